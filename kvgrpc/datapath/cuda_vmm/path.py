"""Path `cuda_vmm`: the destination maps the source's GPU memory read-only, and its own GPU copies runs out of it.

The path works between processes of one host and one user, on one GPU or on two of which one reaches the other. The
source's memory must be in allocations that can be exported as file descriptors; the destination's may be any GPU
memory. To connect, a rank fetches the descriptors with a token, which is valid once under each rank number, and maps
them read-only. The GPU reads a nonce through such a mapping, which proves that the descriptors are what the peer
offered.

As with `shm`, the mappings outlive the peer: reads still find the bytes that it left and end DONE. The settle decides
if the bytes were still valid. The peer's memory returns to its GPU only when the mappings are gone, too.
"""

import contextlib
import hmac
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from uuid import UUID

import numpy as np

from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import SPANS_MAX, AllocationSpan, CudaVmmEndpoint, MemoryKind, RankEndpoint, Segment
from kvgrpc.datapath.base import DataPathFailed, DataPathUnavailable, Memory
from kvgrpc.datapath.cuda_vmm import libcuda
from kvgrpc.datapath.cuda_vmm.driver import Driver, DriverError
from kvgrpc.datapath.cuda_vmm.exports import ALLOCATIONS_MAX, Exports
from kvgrpc.datapath.cuda_vmm.memory import KEPT, VmmMemory
from kvgrpc.datapath.host.addresses import check_runs, groups, to_rows
from kvgrpc.datapath.host.memory import NONCE_BYTES, memory_bytes
from kvgrpc.datapath.host.process import ADDRESS_MAX
from kvgrpc.datapath.host.process_socket import ProcessSocket
from kvgrpc.datapath.mirror import lane
from kvgrpc.datapath.mirror.device import CopyFailed
from kvgrpc.datapath.mirror.lane import CopyJob, CopyLane, Start
from kvgrpc.datapath.questions import Answer, ProcessEnd, Question

_REST_S = 2.0
"""Time that `close` waits for the pieces in flight, in seconds."""


class CudaVmmPath:
    """Offers this rank's GPU memory, and reads that of peers.

    `driver` is the one that made a VmmMemory, else the machine's. Peers ask for descriptors at `socket`, which all
    paths of a rank share. Raises DataPathUnavailable for memory that is not on one GPU, and without a driver.
    """

    name = "cuda_vmm"
    needs_polling = False
    peers_need_turns = False

    def __init__(self, memory: Memory, driver: Driver | None = None, *, socket: ProcessSocket | None = None) -> None:
        devices = {segment.device for segment in memory.segments}
        if len(devices) != 1 or any(segment.kind is not MemoryKind.CUDA for segment in memory.segments):
            raise DataPathUnavailable("this rank's memory is not that of one GPU")
        self._memory = memory
        self._device = devices.pop()
        self._exports: Exports | None = None
        self._why_not = ""
        try:
            self._driver = driver or (memory.driver if isinstance(memory, VmmMemory) else libcuda.load())
            self._uuids = self._driver.uuids()
            self._export()
        except DriverError as error:
            raise DataPathUnavailable(f"the driver of GPUs cannot be used: {error.message}") from error
        self._socket = socket or ProcessSocket()
        self._lane = CopyLane(f"kvgrpc-{self.name}")
        self._mappings: set[Mappings] = set()

    def _export(self) -> None:
        try:
            self._exports = Exports(self._driver, self._device, self._memory.segments)
        except DataPathUnavailable as error:
            self._why_not = error.message
        except (DriverError, CopyFailed) as error:
            self._why_not = f"the driver refuses ({error.message}); nixl may reach this memory"

    @property
    def exports(self) -> bool:
        """True if this rank's memory can be given to peers."""
        return self._exports is not None

    @property
    def why(self) -> str:
        """Description for people of how this rank's memory is reached."""
        reads = "memory of GPUs that peers on this host export is mapped read-only and copied"
        return f"{reads}; this rank exports none: {self._why_not}" if self._why_not else reads

    def offer(self, endpoint: RankEndpoint, peer: str = "") -> RankEndpoint:
        """Adds this path's part. If there is nothing to offer, the part has the reason instead."""
        exports = self._exports
        if exports is None:
            return replace(endpoint, cuda_vmm=CudaVmmEndpoint(why_not=self._why_not))
        path, token = self._socket.mint(peer, self.name, lambda *_: exports.descriptors())
        uuid = self._uuids[self._device]
        part = CudaVmmEndpoint(path, token, uuid, exports.nonce, exports.allocations, exports.spans)
        return replace(endpoint, cuda_vmm=part)

    def withdraw(self, peer: str) -> None:
        self._socket.revoke(peer)

    def question(self, endpoint: RankEndpoint) -> Question:
        part = self._part(endpoint)
        return self._socket.question(part.socket_path, part.token, len(part.allocations) + 1)

    def connect(self, endpoint: RankEndpoint, answer: Answer | str) -> "CudaVmmRemote":
        part = self._part(endpoint)
        if isinstance(answer, str):
            raise DataPathUnavailable(answer)
        home = self._uuids.index(part.device_uuid)
        fds: tuple[int, ...] = ()
        try:
            unit = self._driver.granularity(home)
            fds = answer.take_fds()
            mappings = Mappings(self._driver, self._device, part, home, fds, unit)
        except (DriverError, CopyFailed) as error:
            raise DataPathUnavailable(f"the peer's descriptors cannot be mapped: {error.message}") from error
        finally:
            for fd in fds:
                os.close(fd)
        self._mappings.add(mappings)
        return CudaVmmRemote(self, mappings, answer.take_end(), self._said_of(part.device_uuid))

    def _part(self, endpoint: RankEndpoint) -> CudaVmmEndpoint:
        part = endpoint.cuda_vmm
        if part is None:
            raise DataPathUnavailable("the peer offers no memory of a GPU")
        if part.why_not:
            raise DataPathUnavailable(f"the peer offers nothing: {part.why_not}")
        _check(part)
        if part.device_uuid not in self._uuids:
            raise DataPathUnavailable(
                f"the peer's memory is on {_shown(part.device_uuid)}, which this process does not see: another host's,"
                " or hidden by CUDA_VISIBLE_DEVICES"
            )
        other = self._uuids.index(part.device_uuid)
        if other != self._device and not self._driver.reaches(self._device, other):
            raise DataPathUnavailable(
                f"{_shown(self._uuids[self._device])} has no peer access to {_shown(part.device_uuid)}, the peer's"
            )
        return part

    def _said_of(self, uuid: bytes) -> str:
        own = self._uuids[self._device]
        return "the same GPU" if uuid == own else f"{_shown(uuid)}, by {_shown(own)}"

    def start(self, runs: Runs, mappings: "Mappings", wake: Callable[[], None]) -> CopyJob:
        """Starts to copy checked runs of a peer's memory into this rank's."""
        job = CopyJob(self._pieces(runs, mappings.segments), wake)
        self._lane.copy(job)
        return job

    @property
    def nbytes(self) -> int:
        """Length of this rank's memory, in bytes."""
        return memory_bytes(self._memory.segments)

    def forget(self, mappings: "Mappings") -> None:
        """Unmaps a peer's memory. Idempotent."""
        self._mappings.discard(mappings)
        mappings.close()

    def _pieces(self, runs: Runs, source: Sequence[Segment]) -> Iterator[Start]:
        rows = to_rows(runs, source, self._memory.segments, lane.PIECE_BYTES)
        for first, end in groups(rows[:, 2], lane.PIECE_BYTES, lane.PIECE_RUNS):
            yield partial(self._driver.copy, self._device, rows[first:end])

    def progress(self) -> None:
        """Does nothing: the GPU copies, and a thread waits for it."""

    def close(self) -> None:
        """Ends copies, after the pieces in flight, and releases all memory. Idempotent.

        Raises DataPathFailed if it is not proved that the GPU copies no more.
        """
        self._socket.close()
        self._lane.stop()
        if not self._lane.at_rest(_REST_S):
            raise DataPathFailed("a copy on the GPU did not end, or ended without proof")
        with contextlib.ExitStack() as rest:
            if self._exports is not None:
                rest.callback(self._exports.close)
            for mappings in list(self._mappings):
                rest.callback(self.forget, mappings)


class CudaVmmRemote:
    """A peer's GPU memory, mapped read-only."""

    def __init__(self, path: CudaVmmPath, mappings: "Mappings", process: ProcessEnd | None, on: str) -> None:
        self._path = path
        self._mappings = mappings
        self.process = process
        self._on = on

    @property
    def why(self) -> str:
        return (
            f"same host: the peer's {memory_bytes(self._mappings.segments)} bytes of a GPU are mapped read-only and"
            f" copied on {self._on}"
        )

    def read(self, runs: Runs, wake: Callable[[], None]) -> CopyJob:
        check_runs(runs, memory_bytes(self._mappings.segments), self._path.nbytes)
        return self._path.start(runs, self._mappings, wake)

    def close(self) -> None:
        """Unmaps the memory. Idempotent."""
        self._path.forget(self._mappings)


class Mappings:
    """The allocations of a checked endpoint, mapped read-only by the descriptors that came for it.

    The mappings are for `device`, and are memory of the device `home`. `unit` is the size of the nonce's, in bytes.
    Raises DataPathUnavailable for descriptors that do not match the endpoint, DriverError, and CopyFailed. Nothing is
    mapped then except what a lost copy may still read. The caller owns the descriptors in any case.
    """

    def __init__(
        self, driver: Driver, device: int, part: CudaVmmEndpoint, home: int, fds: Sequence[int], unit: int
    ) -> None:
        if len(fds) != len(part.allocations) + 1:
            raise DataPathUnavailable(
                f"the peer sent {len(fds)} descriptors for {len(part.allocations)} allocations and a nonce"
            )
        self._driver, self._device, self._home = driver, device, home
        self._said_home = part.device_uuid
        self._mapped: list[tuple[int, int]] = []
        try:
            # The nonce is first, so that a foreign allocation is found before any other is mapped.
            self._check_nonce(part.nonce, fds[-1], unit)
            for fd, nbytes in zip(fds, part.allocations, strict=False):
                self._map(fd, nbytes)
        except BaseException:
            self.close()
            raise
        self.segments = tuple(self._segment(span) for span in part.spans)

    def close(self) -> None:
        """Unmaps everything. Idempotent."""
        with contextlib.ExitStack() as rest:
            while self._mapped:
                rest.callback(self._driver.unmap, self._device, *self._mapped.pop())

    def _check_nonce(self, said: bytes, fd: int, unit: int) -> None:
        address = self._map(fd, unit)
        nonce = np.zeros(NONCE_BYTES, dtype=np.uint8)
        row = (nonce.ctypes.data, address, NONCE_BYTES)
        try:
            self._driver.copy(self._device, np.array([row], dtype=np.int64)).synchronize()
        except CopyFailed:
            raise
        except BaseException:
            KEPT.append((nonce, self._mapped.pop()))
            raise
        if not hmac.compare_digest(nonce.tobytes(), said):
            raise DataPathUnavailable("the descriptors are of other memory than the peer spoke of")
        self._driver.unmap(self._device, *self._mapped.pop())

    def _map(self, fd: int, nbytes: int) -> int:
        handle = self._driver.import_(self._device, fd)
        try:
            if not self._driver.is_of(handle, self._home):
                raise DataPathUnavailable(
                    f"the peer sent a descriptor of memory that is not of {_shown(self._said_home)}, as the peer says"
                )
            address = self._driver.map(self._device, handle, nbytes, writable=False)
            self._mapped.append((address, nbytes))
        finally:
            self._driver.release(handle)  # the mapping keeps the memory
        return address

    def _segment(self, span: AllocationSpan) -> Segment:
        address, _ = self._mapped[span.allocation]
        return Segment(address + span.offset, span.nbytes, MemoryKind.CUDA, self._device)


def _check(part: CudaVmmEndpoint) -> None:
    """Raises DataPathUnavailable for numbers that the driver's calls cannot take."""
    sizes = part.allocations
    sane = (
        len(part.nonce) == NONCE_BYTES
        and 0 < len(sizes) <= ALLOCATIONS_MAX
        and all(0 < size < ADDRESS_MAX for size in sizes)
        and 0 < len(part.spans) <= SPANS_MAX
        and all(
            0 <= span.allocation < len(sizes)
            and span.offset >= 0
            and 0 < span.nbytes <= sizes[span.allocation] - span.offset
            for span in part.spans
        )
        and part.nbytes < ADDRESS_MAX
    )
    if not sane:
        raise DataPathUnavailable("the peer's description of its memory contradicts itself")


def _shown(uuid: bytes) -> str:
    """Returns a GPU's name as in nvidia-smi."""
    return f"GPU-{UUID(bytes=uuid)}" if len(uuid) == libcuda.UUID_BYTES else f"GPU {uuid.hex()[:32]}"
