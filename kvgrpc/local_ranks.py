"""The ranks of a server in its own process: with memory that it shares with a worker, or of its own pool.

The server's own pool may lie on a device. NIXL moves it from there if it can register that memory; it refuses if its
UCX does not know the device. `cuda_vmm` moves it to and from other GPUs of this host. Checksums need host memory.
Otherwise the rank keeps a mirror, as an engine's does.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from kvgrpc.config import HOST, Config
from kvgrpc.core.actions import Expect, RankAction
from kvgrpc.datapath.base import DataPath
from kvgrpc.datapath.cuda_vmm.path import CudaVmmPath
from kvgrpc.datapath.device_memory import DeviceMemory, MakeDeviceMemory
from kvgrpc.datapath.host.memory import PrivateMemory, SharedMemory
from kvgrpc.datapath.host.own_host import own_host
from kvgrpc.datapath.local_rank import DataPathStatus, LocalRank, make_paths
from kvgrpc.datapath.mirror.device import Device
from kvgrpc.datapath.mirror.mirror import make_memory
from kvgrpc.datapath.shared_folder import folder_of
from kvgrpc.errors import KVGrpcError, PreconditionFailed, Reason, Unavailable
from kvgrpc.service.runner import RankPort, Runner

_log = logging.getLogger(__name__)
VMM, NIXL = "cuda_vmm", "nixl"
DIRECT = (VMM, NIXL)
"""Data paths that reach devices."""
ALONE = "only engines on GPUs of this host would reach the pool by it: who wants that puts it first in data_paths"

_KEPT: list[DeviceMemory] = []
"""Memory of closed ranks that a copy or a data path may still use."""


class SharedRank(LocalRank):
    """A rank that moves bytes for a worker. The worker hears who may write into their shared memory, and still knows it
    after this process has ended.
    """

    worker: RankPort | None = None
    mirrored = False

    def perform(self, action: RankAction) -> None:
        if isinstance(action, Expect) and not action.writes:
            # Deferred until the peer's answer is on its way: the mover would take the interpreter from the task that
            # sends it. Only turns depend on this.
            asyncio.get_running_loop().call_soon(self._expect_read, action)
            return
        super().perform(action)
        if isinstance(action, Expect) and self.worker is not None:
            self.worker.perform(action)

    def _expect_read(self, action: Expect) -> None:
        with contextlib.suppress(Unavailable):  # the rank was closed meanwhile
            super().perform(action)

    async def read_runs(self, runs: Sequence[tuple[int, int]]) -> list[bytes]:
        """Returns bytes of the rank's memory, by (offset, length), for debugging."""
        assert isinstance(self.memory, SharedMemory)
        pool = self.memory.as_numpy()
        return [pool[offset : offset + nbytes].tobytes() for offset, nbytes in runs]


class DeviceRank(SharedRank):
    """The rank of a pool on a device. `memory`, for the data paths, is the device's own or a mirror of it."""

    def __init__(
        self, pool: DeviceMemory, memory: SharedMemory | PrivateMemory, device: Device | None, *rest: Any
    ) -> None:
        self.mirrored = device is not None
        super().__init__(0, memory, *rest, device=device)
        self._pool = pool

    async def read_runs(self, runs: Sequence[tuple[int, int]]) -> list[bytes]:
        """Returns bytes of the device's memory, read in a thread, off the event loop."""
        return await asyncio.to_thread(self._pool.read, runs)

    def close(self, deadline_s: float) -> bool:
        at_rest = super().close(deadline_s)
        if at_rest:
            self._pool.close()
        elif self._pool not in _KEPT:
            _KEPT.append(self._pool)
        return at_rest


class RankMaker:
    """Makes ranks as configured. `address` returns the address that peers dial. Its methods wait for memory, so the
    event loop's thread must not call them. Raises InvalidRequest for an unusable shared folder.
    """

    def __init__(
        self, config: Config, runner: Runner, device_memory: MakeDeviceMemory, address: Callable[[], str]
    ) -> None:
        self._config = config
        self._folder = folder_of(config.shared_dir)
        self._address = address
        self._runner = runner
        self._device_memory = device_memory

    def shared(self, rank: int, nbytes: int, fd: int | None) -> tuple[SharedRank, list[DataPathStatus]]:
        """Makes a rank with shared memory, new or known by its descriptor. Raises Exhausted, and PreconditionFailed if
        the memory is not of this size.
        """
        memory = SharedMemory.create(nbytes) if fd is None else SharedMemory.attach(fd)
        if memory.nbytes != nbytes:
            memory.close()
            what = f"rank {rank} brings {memory.nbytes} bytes of shared memory for a pool of {nbytes}"
            raise PreconditionFailed(Reason.POOL_KIND_MISMATCH, what)
        paths, status = self._paths_of(memory, self._config.data_paths)
        return self._wired(SharedRank(rank, memory, *self._rest(paths))), status

    def of_own_pool(self, nbytes: int) -> tuple[SharedRank, list[DataPathStatus]]:
        """Makes the rank of the server's own pool. Raises the errors of `shared`, and those of `MakeDeviceMemory`."""
        assert self._config.pool is not None
        if self._config.pool.device == HOST:
            rank, status = self.shared(0, nbytes, None)
        else:
            exported = self._config.data_paths[0] == VMM and not self._config.checksums
            pool = self._device_memory(self._config.pool.device, nbytes, exported=exported)
            try:
                rank, status = self._on_device(pool)
            except BaseException:
                pool.close()
                raise
        if isinstance(rank.memory, SharedMemory):
            rank.memory.seal()
        return rank, status

    def _on_device(self, pool: DeviceMemory) -> tuple[SharedRank, list[DataPathStatus]]:
        names = self._config.data_paths
        paths, rows, why_not = self._direct(pool)
        said = {row[0]: row for row in rows}
        if paths:
            status = [said.get(name, (name, False, f"the pool is on {pool.name}")) for name in names]
            return self._wired(DeviceRank(pool, pool.memory, None, *self._rest(paths))), status
        _log.info("the pool on %s moves by a mirror in host memory: %s", pool.name, why_not)
        device = pool.device()
        memory = make_memory(device)
        paths, found = self._paths_of(memory, names)
        try:
            rank = DeviceRank(pool, memory, device, *self._rest(paths))
        except KVGrpcError:
            for path in paths:
                path.close()
            device.close()
            memory.close()
            raise
        of_mirror = [(name, ok, f"of a mirror of {pool.name}: {why}") for name, ok, why in found]
        return self._wired(rank), [said[VMM] if row[0] == VMM and VMM in said else row for row in of_mirror]

    def _direct(self, pool: DeviceMemory) -> tuple[list[DataPath], list[DataPathStatus], str]:
        """Returns the data paths that reach the device and their status, or why none may be used."""
        names = tuple(name for name in self._config.data_paths if name in DIRECT)
        if self._config.checksums:
            return [], [], "checksums are of host memory"
        if not names:
            return [], [], f"neither {' nor '.join(DIRECT)} is among data_paths"
        pool.use()
        paths, rows = self._paths_of(pool.memory, names)
        first = self._config.data_paths[0] == VMM
        exports = any(isinstance(path, CudaVmmPath) and path.exports for path in paths)
        if (exports and first) or any(path.name == NIXL for path in paths):
            return paths, rows, ""
        for path in paths:
            path.close()
        rows = [(name, False, ALONE if ok and name == VMM and not first else why) for name, ok, why in rows]
        return [], rows, "; ".join(f"{name}: {why}" for name, _, why in rows)

    def _paths_of(
        self, memory: SharedMemory | PrivateMemory, names: tuple[str, ...]
    ) -> tuple[list[DataPath], list[DataPathStatus]]:
        return make_paths(memory, names, self._config.copy_threads, own_host(self._address()), self._folder)

    def _rest(self, paths: list[DataPath]) -> tuple[Any, ...]:
        config = self._config
        return paths, self._runner.feed_threadsafe, config.bandwidth_limit_bytes_per_s, config.copy_threads

    def _wired(self, rank: SharedRank) -> SharedRank:
        rank.feed_here = self._runner.feed
        return rank


def make_device_memory(device: str, nbytes: int, *, exported: bool) -> DeviceMemory:
    """Makes memory of a CUDA device, with torch. See `MakeDeviceMemory`."""
    from kvgrpc.engine.cuda_memory import CudaMemory

    return CudaMemory(device, nbytes, exported=exported)
