"""Engines for tests: `kvgrpc serve` processes with a tiny embedded pool, driven over gRPC like by any client.

A test writes KV like an engine, into the memory that the server shares. It reads KV back through ReadBlocks or from
that memory. Every process must end in order, without a logged defect.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from kvgrpc.v1 import admin_pb2, common_pb2, handoff_pb2, handshake_pb2, lease_pb2, pool_pb2, transfer_pb2
from tests.service.api import Api, read_refusal, without
from tests.service.forks import Forked, Forker
from tests.service.values import content, dur, for_readers, group, ids_of, named_blocks, new_key

READY_S = 90.0
"""Timeout until a process serves, in seconds. That takes half a second, or 20 seconds on a very busy machine."""
EXIT_S = 60.0
WAIT_S = 45.0
"""Timeout for things that happen by themselves, in seconds; far above what any of them takes."""
HOME = f"127.{1 + (os.getpid() >> 16) % 254}.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
"""Loopback address of this process's servers. Outgoing connections and other processes' servers use other addresses, so
that a killed server finds its port free when it restarts."""
BLOCK_TOKENS = 16
LAYERS = 2
LAYER_BYTES = 2 * BLOCK_TOKENS * 2 * 8 * 2
"""Bytes of a block in one layer: K and V, tokens, heads, elements, bytes of a float16."""
BLOCK_BYTES = LAYERS * LAYER_BYTES
SMALL_POOL = ("--layers", "2", "--kv-heads", "2", "--head-dim", "8", "--blocks", "520")

SUCCEEDED = transfer_pb2.TRANSFER_STATE_SUCCEEDED
FAILED = transfer_pb2.TRANSFER_STATE_FAILED
CANCELLED = transfer_pb2.TRANSFER_STATE_CANCELLED
RETURNED = transfer_pb2.MEMORY_DISPOSITION_RETURNED
QUARANTINED = transfer_pb2.MEMORY_DISPOSITION_QUARANTINED
_DEFECT = re.compile(r"Traceback|ERROR .*a defect of kvgrpc|could not perform|Segmentation fault")


class ServeProcess:
    """A `kvgrpc serve` process. `settings` is the text of the TOML file, and `flags` are more arguments.

    With `fresh` it has an interpreter of its own, as users start it; else it is forked from one that has imported
    everything. `within` is a command that starts it elsewhere, and becomes it.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        settings: str = "",
        environment: Mapping[str, str] | None = None,
        fresh: bool = False,
        within: Sequence[str] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.ready_file = folder / "ready.json"
        self._log = folder / "log"
        config = folder / "kvgrpc.toml"
        config.write_text(settings)
        arguments = ["serve", "--config", str(config), "--ready-file", str(self.ready_file), *flags]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("KVGRPC_", "OTEL_"))}
        whole = clean | dict(environment or {})
        self.popen: subprocess.Popen[bytes] | Forked
        with self._log.open("wb") as log:
            if fresh or within or "PYTHONPATH" in (environment or {}):
                self.popen = subprocess.Popen(
                    [*within, sys.executable, "-m", "kvgrpc", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=whole,
                )
            else:
                self.popen = _forker().start(arguments, whole, log.fileno())

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")  # gRPC logs bytes that it received

    def wait_ready(self) -> dict[str, Any]:
        """Waits for the readiness file and returns its content. Fails if the process ends instead."""
        wait_until(lambda: self.ready_file.exists() or self.popen.poll() is not None, READY_S, self._log.read_text)
        assert self.popen.poll() is None, f"ended with {self.popen.returncode}:\n{self.log}"
        found: dict[str, Any] = json.loads(self.ready_file.read_text())
        return found

    def wait_exit(self) -> int:
        return self.popen.wait(EXIT_S)

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stops the process inside the context, so that it acts like a network that drops everything."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kills the process with SIGKILL."""
        self.signal(signal.SIGKILL)
        self.wait_exit()

    def end(self) -> None:
        """Ends the process if it runs. Checks that it ended in order, unless a test killed it."""
        if self.popen.poll() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
            try:
                self.wait_exit()
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"did not end on SIGTERM:\n{self.log}") from None
        assert self.popen.returncode in (0, 2, 3, 4, -signal.SIGKILL), f"{self.popen.returncode}:\n{self.log}"
        self.check_log()

    def check_log(self) -> None:
        """Checks that the process has logged no defect so far."""
        assert not _DEFECT.search(self.log), self.log


@cache
def _forker() -> Forker:
    return Forker()


class Engine:
    """A server that serves, with helpers for tests."""

    def __init__(self, process: ServeProcess) -> None:
        self.process = process
        ready = process.wait_ready()
        self.address: str = ready["address"]
        self.engine_id: str = ready["engine_id"]
        self.api = Api(self.address)
        self._allocated: set[int] = set()

    # -- blocks

    def allocate(self, count: int = 1) -> list[int]:
        """Allocates blocks of group 0, which `reset` gives back."""
        counts = [pool_pb2.GroupBlockCount(group=0, block_count=count)]
        request = pool_pb2.AllocateBlocksRequest(group_block_counts=counts)
        ids = ids_of(self.api.pool.AllocateBlocks(request).blocks)
        self._allocated.update(ids)
        return ids

    def free(self, ids: Sequence[int]) -> list[int]:
        """Gives blocks back, and returns those that are free now."""
        return ids_of(self.api.pool.FreeBlocks(pool_pb2.FreeBlocksRequest(blocks=self.blocks(ids))).freed_blocks)

    def blocks(self, ids: Iterable[int], index: int = 0) -> common_pb2.Blocks:
        """Names blocks of a group, in this life."""
        return self.named(group(ids, index))

    def named(self, *groups: common_pb2.GroupBlocks) -> common_pb2.Blocks:
        """Names any rows, in this life."""
        return named_blocks(self.incarnation(), *groups)

    def of_this_life(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a request's fields. Blocks listed as rows are named in this life, or in that of "incarnation"."""
        made = dict(fields)
        life = made.pop("incarnation", None)
        if isinstance(made.get("blocks"), list):
            made["blocks"] = self.named(*made["blocks"])
        if life is not None:
            made["blocks"].incarnation = life
        return made

    def counts(self) -> pool_pb2.GroupStatus:
        """Returns the counts of group 0."""
        return self.api.pool.GetPoolStatus(pool_pb2.GetPoolStatusRequest()).groups[0]

    def write(self, ids: Sequence[int], seed: int) -> list[bytes]:
        """Fills blocks with bytes that follow from the seed. Returns them block by block, layer after layer."""
        random = np.random.default_rng(seed)
        written = [random.bytes(BLOCK_BYTES) for _ in ids]
        for block, data in zip(ids, written, strict=True):
            for layer in range(LAYERS):
                part = data[layer * LAYER_BYTES : (layer + 1) * LAYER_BYTES]
                self._memory(layer, block, partial(_write, part))
        return written

    def read(self, ids: Sequence[int]) -> list[bytes]:
        """Returns the bytes of blocks, read with ReadBlocks."""
        request = pool_pb2.ReadBlocksRequest(blocks=self.blocks(ids))
        return [row.data for row in self.api.pool.ReadBlocks(request).blocks]

    def _memory(self, layer: int, block: int, use: Callable[[int, int], object]) -> None:
        """Calls `use` with the place of a layer of a block in this engine's shared memory."""
        maps = Path(f"/proc/{self.process.pid}/maps").read_text()
        # Pools of peers are mapped too, but never writable.
        pool = next(line for line in maps.splitlines() if "memfd:kvgrpc-pool" in line and " rw-s " in line)
        start = int(pool.partition("-")[0], 16)
        fd = os.open(f"/proc/{self.process.pid}/mem", os.O_RDWR)
        try:
            use(fd, start + (layer * self._blocks + block) * LAYER_BYTES)
        finally:
            os.close(fd)

    @cached_property
    def _blocks(self) -> int:
        described = self.api.pool.DescribePools(pool_pb2.DescribePoolsRequest())
        return described.pools[0].groups[0].block_count

    # -- hand-overs and pulls

    def hand_over(
        self, token_ids: Sequence[int], ids: Sequence[int] | None = None, **fields: Any
    ) -> handoff_pb2.FinishedBlocksResponse:
        """Calls FinishedBlocks for readers, with newly allocated blocks unless `ids` names some."""
        if ids is None:
            ids = self.allocate(blocks_for(len(token_ids)))
        usual = {"transfer_key": new_key(), "content": content(token_ids), "blocks": self.blocks(ids)}
        return self.api.handoff.FinishedBlocks(for_readers(**self.of_this_life({**usual, **fields})))

    def pull(
        self, grant: common_pb2.Grant, token_ids: Sequence[int], blocks: Sequence[int] | None, **fields: Any
    ) -> transfer_pb2.Transfer:
        """Calls PullBlocks into `blocks`; None means that they are not known yet."""
        chosen = {"content": content(token_ids), **fields}
        request = handoff_pb2.PullBlocksRequest(grant=grant, **chosen)
        if blocks is not None:
            request.destination.CopyFrom(self.into(blocks))
        return self.api.handoff.PullBlocks(request).transfer

    def into(self, ids: Sequence[int], have_tokens: int = 0) -> handoff_pb2.PullDestination:
        """Returns the destination of a pull. Without blocks, nothing is pulled."""
        return handoff_pb2.PullDestination(blocks=self.blocks(ids) if ids else None, have_tokens=have_tokens)

    def give(self, transfer_id: str, blocks: Sequence[int]) -> transfer_pb2.Transfer:
        """Gives blocks to an earlier pull, by its transfer id."""
        request = handoff_pb2.PullBlocksRequest(transfer_id=transfer_id, destination=self.into(blocks))
        return self.api.handoff.PullBlocks(request).transfer

    def get(self, transfer_id: str) -> transfer_pb2.Transfer:
        return self.api.transfers.GetTransfer(transfer_pb2.GetTransferRequest(transfer_id=transfer_id)).transfer

    def wait(self, transfer_id: str, *, returned: bool = True, timeout_s: float = WAIT_S) -> transfer_pb2.Transfer:
        """Waits until a transfer is over (and its memory returned), and returns it. Fails at the timeout."""
        until = transfer_pb2.WAIT_CONDITION_RETURNED if returned else transfer_pb2.WAIT_CONDITION_ENDED
        request = transfer_pb2.WaitTransferRequest(transfer_id=transfer_id, until=until, timeout=dur(timeout_s))
        found = self.api.transfers.WaitTransfer(request).transfer
        assert found.state in (SUCCEEDED, FAILED, CANCELLED), found
        assert found.memory == RETURNED or not returned, found
        return found

    def cancel(self, transfer_id: str, message: str = "", **fields: Any) -> transfer_pb2.CancelTransferResponse:
        return self.api.transfers.CancelTransfer(
            transfer_pb2.CancelTransferRequest(transfer_id=transfer_id, message=message, **fields)
        )

    def lease(self, lease_id: str) -> lease_pb2.Lease:
        request = lease_pb2.GetLeaseRequest(lease=lease_pb2.LeaseRef(lease_id=lease_id))
        return self.api.leases.GetLease(request).lease

    def release(self, lease_id: str) -> lease_pb2.ReleaseLeaseResponse:
        request = lease_pb2.ReleaseLeaseRequest(lease=lease_pb2.LeaseRef(lease_id=lease_id))
        return self.api.leases.ReleaseLease(request)

    def pins(self) -> list[admin_pb2.Pin]:
        return list(self.api.admin.ListPins(admin_pb2.ListPinsRequest(page_size=1000)).pins)

    def incarnation(self) -> int:
        return self.api.admin.GetStatus(admin_pb2.GetStatusRequest()).header.incarnation

    # -- what there is

    def memory_state(self) -> list[str]:
        """Returns the holders of blocks: counts, leases, pins. Fields that change with time are left out."""
        leases = self.api.leases.ListLeases(lease_pb2.ListLeasesRequest(page_size=1000)).leases
        pool = self.api.pool.GetPoolStatus(pool_pb2.GetPoolStatusRequest())
        for counts in pool.groups:
            counts.ClearField("soft_block_count")
        return [
            without(pool, "header"),
            *(without(lease, "age", "remaining", "cap_remaining", "soft_in") for lease in leases),
            *(without(pin, "age") for pin in self.pins()),
        ]

    def transfers_state(self) -> list[str]:
        """Returns all transfers, newest first."""
        request = transfer_pb2.ListTransfersRequest(page_size=1000)
        return [without(t, "age", "duration") for t in self.api.transfers.ListTransfers(request).transfers]

    def check_alive(self) -> None:
        """Checks that the engine answers and takes work."""
        status = self.api.admin.GetStatus(admin_pb2.GetStatusRequest())
        assert status.admission == handshake_pb2.ADMISSION_OPEN, status

    def reset(self) -> None:
        """Ends everything that a test left behind."""
        wanted = transfer_pb2.TransferFilter(
            states=[transfer_pb2.TRANSFER_STATE_PENDING, transfer_pb2.TRANSFER_STATE_ACTIVE]
        )
        request = transfer_pb2.ListTransfersRequest(filter=wanted, page_size=1000)
        for transfer in self.api.transfers.ListTransfers(request).transfers:
            try:
                self.cancel(transfer.transfer_id)
                self.wait(transfer.transfer_id)
            except grpc.RpcError as error:
                # The transfer had ended, and is no longer in a short history.
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
        for lease in self.api.leases.ListLeases(lease_pb2.ListLeasesRequest(page_size=1000)).leases:
            self.release(lease.lease_id)
        self._free_all(sorted(self._allocated))
        self._allocated.clear()
        counts = self.counts()
        assert counts.free_block_count == counts.block_count, f"blocks were lost: {counts} {self.pins()}"

    def _free_all(self, ids: Sequence[int]) -> None:
        """Frees those blocks that the test has not freed, in few calls. A call frees all or none."""
        try:
            self.free(ids)
        except grpc.RpcError:
            if len(ids) > 1:
                self._free_all(ids[: len(ids) // 2])
                self._free_all(ids[len(ids) // 2 :])

    def close(self) -> None:
        self.api.close()
        self.process.end()


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def wait_until(condition: Callable[[], bool], timeout_s: float = WAIT_S, what: Callable[[], object] = str) -> None:
    """Polls a condition that no call waits for. Fails at the deadline with the result of `what`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"did not come within {timeout_s} s: {what()}"
        time.sleep(0.005)


def meet(one: Engine, other: Engine) -> None:
    """Connects two engines to each other. Tries again, because a busy machine may miss a handshake's timeout."""

    def connected(engine: Engine, peer: Engine) -> bool:
        request = handshake_pb2.ConnectPeerRequest(peer=common_pb2.PeerAddress(address=peer.address))
        try:
            engine.api.handshake.ConnectPeer(request)
        except grpc.RpcError as error:
            if read_refusal(engine.api.last_method, error).reason != "PEER_UNREACHABLE":
                raise
            return False
        return True

    wait_until(lambda: connected(one, other) and connected(other, one))


@contextlib.contextmanager
def unchanged(*engines: Engine) -> Iterator[None]:
    """Checks that the body changes nothing on these engines, and that they go on serving."""
    before = [engine.memory_state() + engine.transfers_state() for engine in engines]
    yield
    assert [engine.memory_state() + engine.transfers_state() for engine in engines] == before
    for engine in engines:
        engine.check_alive()


@contextlib.contextmanager
def memory_unchanged(*engines: Engine) -> Iterator[None]:
    """Checks the same as `unchanged`, but lets a failed transfer stay in the history."""
    before = [engine.memory_state() for engine in engines]
    yield
    assert [engine.memory_state() for engine in engines] == before
    for engine in engines:
        engine.check_alive()


def _write(part: bytes, fd: int, at: int) -> int:
    return os.pwrite(fd, part, at)
