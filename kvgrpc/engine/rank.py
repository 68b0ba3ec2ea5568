"""Rank: a worker's share of the pool.

With shared memory the lead makes the pool and moves the bytes; the worker maps it. With private memory the worker
brings tensors of its own, and the mover runs here, in a thread that posts and polls with the interpreter lock released.
With a device the mover works in a mirror of the device's memory.

A lead that dies is replaced if the ticket says so. The rank then takes no more commands, drops what is not posted, and
lets its postings end, or ends them with their data paths. The rank attaches again only when its memory is proved to be
at rest. Memory and views of it stay as they are, and reported steps are reported again.

On another host than its lead, a rank speaks as to a lead to a process beside it, which passes everything on over the
network (`kvgrpc/engine/session/rank_link.py`).
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core import events
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.datapath.host.memory import PrivateMemory, SharedMemory
from kvgrpc.datapath.host.own_host import own_host
from kvgrpc.datapath.local_rank import LocalRank, make_paths
from kvgrpc.datapath.mirror.device import Device
from kvgrpc.datapath.mirror.mirror import make_memory
from kvgrpc.datapath.shared_folder import VARIABLE, folder_of
from kvgrpc.engine.session.connection import LeadConnection, LeadDied
from kvgrpc.engine.session.rank_link import RankLink
from kvgrpc.engine.steps import Steps
from kvgrpc.engine.ticket import RankCredentials, RankTicket
from kvgrpc.errors import (
    AlreadyExists,
    DeadlineExceeded,
    Exhausted,
    InternalError,
    KVGrpcError,
    OutOfRange,
    PermissionDenied,
    PreconditionFailed,
    Reason,
    Unauthenticated,
    Unavailable,
)
from kvgrpc.session.v1 import rank_pb2, session_pb2
from kvgrpc.wire import session as wire
from kvgrpc.wire.description import pool_from_proto
from kvgrpc.wire.frames import encode
from kvgrpc.wire.rank_commands import action_of

CLOSE_S = 2.0
RETRY_S = 0.05
"""Delay between attempts to reach a new lead, in seconds: its process takes a second to start."""
REMOTE_RETRY_S = 0.5
"""Delay between attempts to reach a new lead over the network, in seconds."""
_NO_LEAD = (Unavailable, PermissionDenied, Exhausted)
"""Errors that are retried: there is no lead yet, its engine is still to come, or peers still hold the old mirror."""
_NO_STREAM = (*_NO_LEAD, AlreadyExists, DeadlineExceeded, Unauthenticated)
"""Errors that are retried over the network: also a broken stream that the lead takes for the worker's, no answer, or a
token that is about to be renewed.
"""
_log = logging.getLogger(__name__)


class Rank:
    """One rank of an engine, attached to its lead. Leaving `with` detaches it, which ends the engine's life."""

    def __init__(  # noqa: PLR0913 - by name, each with a default
        self,
        ticket: RankTicket,
        rank: int = 0,
        tensors: Sequence[Any] = (),
        *,
        device: Device | None = None,
        data_paths: tuple[str, ...] = ("shm", "cma", "nixl", "cuda_vmm", "collective"),
        copy_threads: int = 2,
        bandwidth_limit_bytes_per_s: float | None = None,
        credentials: RankCredentials | None = None,
        shared_dir: str | None = None,
    ) -> None:
        """Attaches the rank. `tensors`: the worker's own memory, in the order of the pool's linear offsets. `device`:
        memory that no data path reaches, of which the rank makes a mirror in host memory. Without either the memory is
        shared, and the lead's own settings hold for what moves. `credentials`: what a rank on another host shows its
        lead; None: the files that KVGRPC_TLS_DIR, or KVGRPC_TLS_CERT, _KEY and _CA, name, if any. `shared_dir`: folder
        where ranks of this host meet whose network namespaces differ; None: the one that KVGRPC_SHARED_DIR names.

        Raises PreconditionFailed (POOL_KIND_MISMATCH) for memory of another size or kind than the engine attached with,
        AlreadyExists (ENGINE_ATTACHED) when the rank has a worker, PermissionDenied (NOT_OWNER) for a ticket of another
        engine, Unavailable when no lead answers or TLS prevents it, Unauthenticated (NOT_AUTHENTICATED) and
        PermissionDenied (ROLE_MISSING) when a lead on another host does not take who this is, InvalidRequest for a
        folder, or files of `credentials`, that are not usable, Exhausted (POOL_EXHAUSTED) if the host has no memory for
        a mirror, and what `Device.open` raises, such as PreconditionFailed (FEATURE_UNAVAILABLE) for a mirror that
        cannot be page-locked. None of these errors ends the engine's life.
        """
        self.rank = rank
        self._ticket = ticket
        self._tensors, self._device = tensors, device
        self._data_paths, self._copy_threads, self._limit = data_paths, copy_threads, bandwidth_limit_bytes_per_s
        if tensors and device is not None:
            raise PreconditionFailed(Reason.POOL_KIND_MISMATCH, "a rank's memory is tensors, or a device's: give one")
        self._folder = folder_of(os.environ.get(VARIABLE, "") if shared_dir is None else shared_dir)
        nbytes = device.nbytes if device is not None else PrivateMemory.of(*tensors).nbytes if tensors else None
        if ticket.address and nbytes is None:
            what = "a rank on another host than its lead shares no memory with it: give it tensors or a device"
            raise PreconditionFailed(Reason.POOL_KIND_MISMATCH, what)
        if nbytes is not None and not ticket.fits(rank, nbytes):
            least = f"{ticket.stage_bytes} to " if ticket.stage_bytes else ""
            what = f"this memory has {nbytes} bytes; the pool has {least}{ticket.memory_bytes} on each rank"
            raise PreconditionFailed(Reason.POOL_KIND_MISMATCH, what)
        self._link = RankLink(ticket.address, credentials) if ticket.address else None
        try:
            self._connection = self._next = self._connect()
        except BaseException:
            if self._link is not None:
                self._link.close()
            raise
        self._lock = threading.Lock()  # serializes sends
        self._closing = threading.Event()
        self._steps = Steps()
        self._thread: threading.Thread | None = None
        self._shared: SharedMemory | None = None
        self._mover: LocalRank | None = None
        self._next_memory: SharedMemory | PrivateMemory | None = None
        """Memory for the next lead's data paths; a device is open with it."""
        self._at_rest = True
        self._written: set[str] = set()
        """Open accesses by which peers may write into shared memory; only the lead's data paths could prove an end."""
        self._over = False
        """True once the engine's life is over for this rank."""
        try:
            self._attach(returns=False)
        except BaseException:
            self.close()
            raise
        self._thread = threading.Thread(target=self._live, name=f"kvgrpc-rank-{rank}", daemon=True)
        self._thread.start()

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The rank's shared pool, shape [total_bytes], writable. Views of it stay readable after `close`."""
        if self._shared is None:
            raise PreconditionFailed(Reason.POOL_KIND_MISMATCH, "this rank brought its own memory")
        return self._shared.as_numpy()

    def step_done(self, step: int) -> None:
        """Reports that all work of the engine's steps up to `step` is done on this rank. Raises LeadDied when the
        session is over. While a lead is being replaced, the next lead gets the report.

        The caller waits first for all device work that a later kernel must not overtake.
        """
        self._report_step(step)

    def layers_done(self, step: int, first: int, count: int) -> None:
        """Reports like `step_done`, for some layers only: parts of a push that cover only these layers can move."""
        self._report_step(step, (first, count))

    def close(self) -> None:
        """Detaches the rank; memory that the worker brought is at rest when this returns. Idempotent.

        Raises InternalError (DATA_PATH_FAILED), on every call, when a data path may still use that memory: keep the
        memory as it is, and end the process.
        """
        self._closing.set()
        self._connection.shutdown()
        self._next.shutdown()
        if self._thread is not None:
            self._thread.join()
        self._connection.close()
        if self._link is not None:
            self._link.close()
        self._drop_next_memory()
        if self._shared is not None:
            self._shared.close()
        if not self._at_rest:
            raise InternalError(
                Reason.DATA_PATH_FAILED,
                f"a data path of rank {self.rank} did not close and may still use its memory: free and reuse nothing "
                "of it, and end this process",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- attaching, for the first time and again

    def _attach(self, *, returns: bool, timeout_s: float | None = None) -> None:
        """Attaches over the next connection, which then becomes the rank's own. A mirror is made first, since a device
        may refuse it: once a worker has attached, its end ends its engine's life.
        """
        connection = self._next
        not_at_rest = self._not_at_rest() if returns else ""
        brings_memory = bool(self._tensors) or self._device is not None
        if brings_memory and not not_at_rest and self._next_memory is None:
            self._next_memory = self._make_memory()
        request = session_pb2.AttachRankRequest(
            ticket=self._ticket.secret, rank=self.rank, private_memory=brings_memory, returns=returns,
            not_at_rest=not_at_rest, mirrored=self._device is not None,
        )  # fmt: skip
        kept = self._shared.fd if self._shared is not None else -1
        frame = encode(session_pb2.ClientFrame(attach_rank=request))
        answer, descriptor = connection.attach(frame, kept, timeout_s)
        self.pool = pool_from_proto(answer.rank_attached.pool, "pool")
        if not brings_memory and self._shared is None:
            self._shared = _map(descriptor)
        with self._lock:
            for step, layers in self._steps:
                connection.send(self._frame(events.StepDone(self.rank, step, layers)))
            before, self._connection = self._connection, connection
        if before is not connection:
            before.close()
        memory, self._next_memory = self._next_memory, None
        if memory is not None:
            host = own_host(answer.rank_attached.lead_address)
            paths, _ = make_paths(memory, self._data_paths, self._copy_threads, host, self._folder)
            self._mover = LocalRank(
                self.rank, memory, paths, self._report, self._limit, self._copy_threads, device=self._device
            )
            self._mover.feed_here = self._report
            self._at_rest = False

    def _make_memory(self) -> SharedMemory | PrivateMemory:
        """Returns this rank's own memory as its data paths need it. Every lead gets a new mirror: peers may still have
        mapped the last one.
        """
        return PrivateMemory.of(*self._tensors) if self._device is None else make_memory(self._device)

    def _drop_next_memory(self) -> None:
        """Closes memory that no data path knows yet."""
        memory, self._next_memory = self._next_memory, None
        if memory is not None:
            if self._device is not None:
                self._device.close()
            memory.close()

    def _live(self) -> None:
        """Runs session after session, until the engine's life is over."""
        while True:
            last = self._obey()
            if self._mover is not None:
                self._at_rest = self._mover.close(CLOSE_S)
            if last or not self._come_back():
                break
        self._over = True
        self._drop_next_memory()

    def _obey(self) -> bool:
        """Performs the lead's commands until the session ends. Returns whether the engine's life ends with it.

        A command that cannot be performed ends the session: the lead would wait for its report for ever.
        """
        try:
            while not self._connection.closed:
                for frame in self._connection.receive(None):
                    if frame.HasField("over"):
                        return True
                    for command in frame.commands.commands:
                        self._perform(command)
        except LeadDied:
            _log.debug("the session of rank %d is over", self.rank)
        except Exception:  # noqa: BLE001 - logged; the session ends
            _log.exception("rank %d could not perform a command of its lead", self.rank)
            return True
        finally:
            self._connection.shutdown()
        return False

    def _come_back(self) -> bool:
        """Attaches to the next lead. Returns False when none comes, since the engine gave up or was closed, when the
        lead refuses because this rank's memory is not at rest, and when a device does not take its new mirror.
        """
        deadline = time.monotonic() + self._ticket.comes_back_s
        retry_s, waits = (RETRY_S, _NO_LEAD) if self._link is None else (REMOTE_RETRY_S, _NO_STREAM)
        while (left_s := deadline - time.monotonic()) > 0 and self._may_come_back() and not self._closing.wait(retry_s):
            try:
                self._reach()
                self._attach(returns=True, timeout_s=left_s)
            except waits as error:
                _log.debug("rank %d is not back yet: %s", self.rank, error)
                self._next.close()
            except KVGrpcError as error:
                _log.error("rank %d cannot come back: %s", self.rank, error)
                self._next.close()
                return False
            except Exception:  # noqa: BLE001 - logged; the engine's life ends
                _log.exception("rank %d cannot come back", self.rank)
                self._next.close()
                return False
            else:
                return True
        return False

    def _may_come_back(self) -> bool:
        """Returns whether a lead can still come: the folder of its socket goes with its engine."""
        return Path(self._ticket.socket_path).parent.exists() if self._link is None else self._link.alive

    def _not_at_rest(self) -> str:
        """Returns why the memory may still be accessed; empty: it is at rest."""
        if not self._at_rest:
            return "a data path may still use it"
        return "a peer may still write into it" if self._written else ""

    def _perform(self, command: rank_pb2.RankCommand) -> None:
        if self._mover is None:
            if command.expect.writes:
                (self._written.add if command.expect.open else self._written.discard)(command.expect.access)
        elif (action := action_of(self.rank, command)) is not None:
            self._mover.perform(action)

    def _reach(self) -> None:
        """Connects to the next lead. Raises Unavailable."""
        self._next = self._connect()
        if self._closing.is_set():
            self._next.shutdown()

    def _connect(self) -> LeadConnection:
        """Returns a new connection to the lead. Raises Unavailable."""
        return LeadConnection(self._ticket.socket_path) if self._link is None else self._link.connect()

    # -- reports to the lead

    def _report_step(self, step: int, layers: tuple[int, int] | None = None) -> None:
        with self._lock:
            self._steps.done(step, layers)
            try:
                self._connection.send(self._frame(events.StepDone(self.rank, step, layers)))
            except LeadDied:
                if self._over or not self._ticket.comes_back_s:
                    raise

    def _report(self, event: events.Event) -> None:
        """Sends a report of the mover, in its thread or this rank's, or drops it when the session is over."""
        try:
            with self._lock:
                self._connection.send(self._frame(event))
        except LeadDied:
            self._connection.shutdown()
        except OutOfRange as error:
            _log.error("rank %d cannot report %s: %s", self.rank, type(event).__name__, error)
            if isinstance(event, events.EndpointOffered) and event.endpoint != RankEndpoint(self.rank):
                # An endpoint without data paths: only peers that want to reach this rank fail, and they fail at once.
                self._report(replace(event, endpoint=RankEndpoint(self.rank)))
            else:  # like a command that cannot be performed: the lead would wait for the report for ever
                self._connection.shutdown()

    def _frame(self, event: events.Event) -> bytes:
        batch = session_pb2.RankReportBatch(reports=[wire.event_to_report(event)])
        return encode(session_pb2.ClientFrame(reports=batch))


def _map(descriptor: int) -> SharedMemory:
    if descriptor < 0:
        raise Unavailable(Reason.NO_POOL, "the lead sent no memory")
    try:
        return SharedMemory.attach(descriptor)
    finally:
        os.close(descriptor)
