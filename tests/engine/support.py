"""Leads as processes, and engines on their sessions, in the test's own process where a test can look inside.

Bytes are written and read like a worker does it, in `Rank.memory`.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from kvgrpc.client import name_of
from kvgrpc.engine import BlocksReturned, Engine, Event, Failed, HandOver, LeadDied, Pull, Rank, Received, content
from kvgrpc.engine.transfers.handles import AnyBlocks
from kvgrpc.errors import KVGrpcError, OutOfRange, PreconditionFailed, Reason
from kvgrpc.v1 import admin_pb2, lease_pb2, transfer_pb2
from tests.engine.made import BLOCKS, LAYER_BYTES, LAYERS, layout, made_bytes
from tests.service.api import Api
from tests.service.engines import HOME, ServeProcess, wait_until

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 15.0
"""Timeout for things that happen at once on an idle machine, in seconds."""
START_S = 45.0
"""Timeout for a process that imports torch on a busy machine, in seconds."""
QUIET_S = 0.25
"""Time in which something must not happen, in seconds. It would take milliseconds."""
_T = TypeVar("_T")


def new_key() -> bytes:
    return os.urandom(16)


def tokens(count: int, seed: int = 0) -> list[int]:
    """Returns token ids that prompts with other seeds do not share."""
    return [seed * 100_000 + i for i in range(count)]


class Lead:
    """A `kvgrpc serve` that waits for engines at a session socket."""

    def __init__(
        self, folder: Path, name: str, *flags: str, settings: str = "", within: Sequence[str] = (), **environment: str
    ) -> None:
        self.name = name
        self.socket_path = str(folder / f"{name}.sock")
        self.process = ServeProcess(
            folder / name, "--listen", f"{HOME}:0", "--no-pool", "--engine-id", name, "--drain-s", "0",
            "--session-socket", self.socket_path, *flags, settings=settings, environment=environment, within=within,
        )  # fmt: skip

    def wait_ready(self) -> "Lead":
        self.api = Api(self.process.wait_ready()["address"])
        return self

    def status(self) -> admin_pb2.GetStatusResponse:
        return self.api.admin.GetStatus(admin_pb2.GetStatusRequest())

    def leases(self) -> list[lease_pb2.Lease]:
        return list(self.api.leases.ListLeases(lease_pb2.ListLeasesRequest()).leases)

    def transfer(self, transfer_id: str) -> transfer_pb2.Transfer:
        request = transfer_pb2.GetTransferRequest(transfer_id=transfer_id)
        return self.api.transfers.GetTransfer(request).transfer

    def at_rest(self) -> bool:
        """Returns whether no work is in flight and no block is pinned."""
        found = self.status().counts
        transfers = found.pending_transfer_count + found.active_transfer_count
        under_way = transfers + found.lease_count + found.open_access_count
        return not under_way + found.pinned_block_count + found.quarantined_block_count

    def waits_for(self, transfer_id: str) -> str:
        """Returns what a transfer waits for, by its own account."""
        return name_of(transfer_pb2.WaitingFor, self.transfer(transfer_id).waiting_for)

    def wait_for(self, transfer_id: str, waiting_for: str) -> None:
        """Waits until a transfer reports this `waiting_for`."""
        wait_until(
            lambda: self.waits_for(transfer_id) == waiting_for,
            what=lambda: self.transfer(transfer_id),
        )

    def knows(self, transfer_id: str) -> bool:
        """Returns whether the lead still lists a transfer, its history included."""
        request = transfer_pb2.ListTransfersRequest(filter=transfer_pb2.TransferFilter(transfer_ids=[transfer_id]))
        return bool(self.api.transfers.ListTransfers(request).transfers)

    def wait_no_engine(self) -> None:
        """Waits until the lead has noticed that its engine is gone."""
        wait_until(lambda: not self.has_engine())

    def has_engine(self) -> bool:
        return "no engine" not in self.status().admission_reason

    def close(self) -> None:
        if hasattr(self, "api"):
            self.api.close()
        self.process.end()


class Side:
    """An engine in this process with its ranks, all with shared memory."""

    def __init__(self, lead: Lead, **attach: Any) -> None:
        self.lead = lead
        self.engine = Engine.attach(lead.socket_path, **{"pool": layout(), **attach})
        self.ranks: list[Rank] = []
        try:
            for rank in range(attach.get("world_size", 1)):
                self.ranks.append(Rank(self.engine.ticket, rank))
        except KVGrpcError:
            self.close()
            raise

    @cached_property
    def api(self) -> Api:
        """Makes RPC calls that speak for the engine."""
        return Api(self.engine.address, self.engine.ticket.secret)

    def view(self, rank: int = 0) -> NDArray[np.uint8]:
        """Returns a rank's pool, shape [layers, blocks, bytes]."""
        return self.ranks[rank].memory.reshape(LAYERS, -1, LAYER_BYTES)

    def fill(self, blocks: Sequence[int], seed: int, rank: int = 0) -> NDArray[np.uint8]:
        """Puts bytes that follow from the seed into blocks, and returns them."""
        made = made_bytes(blocks, seed)
        self.view(rank)[:, list(blocks)] = made
        return made

    def read(self, blocks: Sequence[int], rank: int = 0) -> NDArray[np.uint8]:
        return self.view(rank)[:, list(blocks)].copy()

    def hand_over(self, blocks: AnyBlocks, prompt: Sequence[int], **fields: Any) -> HandOver:
        """Hands blocks over and sends the call."""
        handover = self.engine.finished_blocks(blocks, content(prompt), **{"transfer_key": new_key(), **fields})
        self.engine.flush()
        return handover

    def poll_until(self, done: Callable[[list[Event]], bool]) -> list[Event]:
        """Polls until `done` accepts the events, and returns all of them."""
        events: list[Event] = []

        def look() -> bool:
            events.extend(self.engine.poll(0.1))
            return done(events)

        wait_until(look, WAIT_S, lambda: events)
        return events

    def finish(self, handle: HandOver | Pull) -> list[Event]:
        """Returns all events of a transfer up to its end. Fails if another transfer has an event."""
        events = self.poll_until(lambda _: handle.over)
        assert [event for event in events if event.transfer is not handle] == []
        return events

    def known(self, handle: HandOver | Pull) -> str:
        """Returns a transfer's id after the lead's answer. Fails if the transfer is over."""
        self.round_trip()
        assert handle.transfer_id
        assert not handle.over
        return handle.transfer_id

    def round_trip(self) -> None:
        """Waits until the lead has handled everything that was sent, with a call that it refuses."""
        with suppress(PreconditionFailed, OutOfRange):
            self.engine.free([BLOCKS])

    def close(self) -> None:
        """Closes the scheduler's connection first, because its end ends the engine."""
        if "api" in vars(self):
            self.api.close()
        self.engine.close()
        for rank in self.ranks:
            rank.close()


class Asked:
    """A process that answers JSON lines over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.pid = 0
        self._connection = connection
        self._lines = connection.makefile("r")

    def ask(self, **request: Any) -> Any:
        """Sends a request and returns its answer."""
        self.send(**request)
        return self.answer()

    def send(self, **request: Any) -> None:
        self._connection.sendall(json.dumps(request).encode() + b"\n")

    def answer(self) -> Any:
        """Returns the next answer. Fails if the process stays silent for `START_S` or has ended."""
        self._connection.settimeout(START_S)
        line = self._lines.readline()
        assert line, "the process has ended"
        return json.loads(line)

    def kill(self) -> None:
        """Kills the process with SIGKILL and waits for its end."""
        pidfd = os.pidfd_open(self.pid)
        os.kill(self.pid, signal.SIGKILL)
        assert ended(pidfd)
        os.close(pidfd)

    def close(self) -> None:
        """Hangs up, which ends the process. Idempotent."""
        self._lines.close()
        self._connection.close()


class EngineProcess(Asked):
    """An engine in a process of its own: see tests/engine/engine_process.py."""

    def __init__(self, *arguments: str) -> None:
        here, there = socket.socketpair()
        super().__init__(here)
        with there:
            command = [sys.executable, "-m", "tests.engine.engine_process", str(there.fileno()), *arguments]
            self.popen = subprocess.Popen(command, cwd=ROOT, pass_fds=[there.fileno()])
        self.pid = self.popen.pid

    def close(self) -> None:
        super().close()
        assert self.popen.wait(WAIT_S) in (0, -signal.SIGKILL)


class Workers:
    """A maker of processes that answer JSON lines: workers with private memory, unless another module is given.
    `within` is a command that starts them elsewhere.
    """

    def __init__(self, module: str = "tests.engine.workers", within: Sequence[str] = ()) -> None:
        self._control, there = socket.socketpair()
        with there:
            command = [*within, sys.executable, "-m", module, str(there.fileno())]
            self._popen = subprocess.Popen(command, cwd=ROOT, pass_fds=[there.fileno()])
        self._made: list[Asked] = []

    def make(self) -> Asked:
        """Makes a new process."""
        here, there = socket.socketpair()
        with there:
            socket.send_fds(self._control, [b"."], [there.fileno()])
        made = Asked(here)
        self._made.append(made)
        self._control.settimeout(START_S)
        made.pid = int(self._control.recv(32))
        return made

    def close(self) -> None:
        """Ends all processes."""
        for made in self._made:
            made.close()
        self._control.close()
        assert self._popen.wait(WAIT_S) == 0


@contextmanager
def refused(reason: Reason, kind: type[KVGrpcError]) -> Iterator[pytest.ExceptionInfo[KVGrpcError]]:
    """Checks that the body raises an error of that kind, with that reason. Yields what is raised."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.reason is reason, caught.value


def kinds(events: Sequence[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


def failure(events: Sequence[Event]) -> Failed:
    """Returns the only Failed of a transfer, which BlocksReturned must follow."""
    failed, returned = events[-2:]
    assert isinstance(failed, Failed), events
    assert isinstance(returned, BlocksReturned), events
    assert sum(isinstance(event, Failed | BlocksReturned | Received) for event in events) == 2, events
    return failed


def received(events: Sequence[Event]) -> Received:
    """Returns the only Received of a transfer, which ended it."""
    last = events[-1]
    assert isinstance(last, Received), events
    assert sum(isinstance(event, Failed | BlocksReturned | Received) for event in events) == 1, events
    return last


def lead_died(side: Side) -> LeadDied:
    """Polls until the session has ended, and returns the error."""
    try:
        side.poll_until(lambda _: False)
    except LeadDied as error:
        return error
    raise AssertionError("unreachable")


def ended(pidfd: int, timeout_s: float = WAIT_S) -> bool:
    """Returns whether a process ends within that time. Also works for children of another process."""
    return readable(timeout_s, pidfd)


def readable(timeout_s: float, *what: int | Engine) -> bool:
    """Returns whether one of them is readable within that time. Uses poll: select takes no descriptor beyond 1,023, and
    a process that runs many tests comes near that.
    """
    waiting = select.poll()
    for one in what:
        waiting.register(one, select.POLLIN)
    return bool(waiting.poll(timeout_s * 1e3))
