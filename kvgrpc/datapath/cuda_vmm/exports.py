"""Descriptors of a rank's own GPU memory for peers: its allocations, and a nonce that proves them.

A peer maps whole allocations. So each must belong to the pool alone, except for less than the unit to which sizes are
rounded up. An engine's own allocations, such as weights, are shown to nobody.
"""

import contextlib
import itertools
import os
import secrets
from collections.abc import Sequence

import numpy as np

from kvgrpc.core.values.endpoints import SPANS_MAX, AllocationSpan, Segment
from kvgrpc.datapath.base import DataPathUnavailable
from kvgrpc.datapath.cuda_vmm.driver import Driver, DriverError, Found
from kvgrpc.datapath.cuda_vmm.memory import KEPT, VmmMemory
from kvgrpc.datapath.host.memory import NONCE_BYTES
from kvgrpc.datapath.host.process_socket import SocketReply
from kvgrpc.datapath.mirror.device import CopyFailed
from kvgrpc.datapath.questions import DESCRIPTORS_MAX

ALLOCATIONS_MAX = DESCRIPTORS_MAX - 1
"""Maximum number of allocations. One answer carries all of them, and the nonce's."""


class Exports:
    """Exports memory of one device. Raises DataPathUnavailable if it cannot be given to a peer, with what would help,
    DriverError, and CopyFailed.
    """

    def __init__(self, driver: Driver, device: int, segments: Sequence[Segment]) -> None:
        self._driver = driver
        self._found: list[Found] = []
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        with contextlib.ExitStack() as undo:
            undo.callback(self._release)
            self.spans = self._all_spans(device, segments)
            self._check_overlaps()
            self._check_rest(driver.granularity(device))
            self._page = self._nonce_page(device)
            undo.callback(self._page.free)
            page = driver.find(device, self._page.segments[0].address)
            if page is not None:
                self._found.append(page)
            if page is None or not (page.exports and page.whole):
                raise DataPathUnavailable("the driver does not know again what it allocated")
            undo.pop_all()

    @property
    def allocations(self) -> tuple[int, ...]:
        """Bytes of each allocation, without the nonce's."""
        return tuple(found.nbytes for found in self._found[:-1])

    def descriptors(self) -> SocketReply:
        """Returns new descriptors, the nonce's last. Raises OSError."""
        fds: list[int] = []
        try:
            fds.extend(self._driver.export(found.handle) for found in self._found)
        except DriverError as error:
            for fd in fds:
                os.close(fd)
            raise OSError(f"the driver gives no descriptor: {error.message}") from error
        return SocketReply(fds=tuple(fds))

    def close(self) -> None:
        """Releases the handles and the nonce. Idempotent."""
        with contextlib.ExitStack() as rest:
            rest.callback(self._page.free)
            rest.callback(self._release)

    def _nonce_page(self, device: int) -> VmmMemory:
        """Makes one more allocation, which begins with the nonce."""
        page = VmmMemory(self._driver, device, NONCE_BYTES)
        written = np.frombuffer(self.nonce, dtype=np.uint8)
        row = (page.segments[0].address, written.ctypes.data, NONCE_BYTES)
        try:
            self._driver.copy(device, np.array([row], dtype=np.int64)).synchronize()
        except CopyFailed:
            page.free()
            raise
        except BaseException:
            KEPT.append((page, written))
            raise
        return page

    def _all_spans(self, device: int, segments: Sequence[Segment]) -> tuple[AllocationSpan, ...]:
        spans: list[AllocationSpan] = []
        for segment in segments:
            spans.extend(self._spans(device, segment))
            if len(spans) > SPANS_MAX:
                raise DataPathUnavailable(
                    f"this memory consists of more than {SPANS_MAX} spans, which is what a handshake carries: bring it"
                    " in fewer tensors"
                )
        return tuple(spans)

    def _spans(self, device: int, segment: Segment) -> list[AllocationSpan]:
        spans = []
        at, end = segment.address, segment.address + segment.nbytes
        while at < end:
            index = self._index(device, at)
            found = self._found[index]
            upto = min(end, found.address + found.nbytes)
            spans.append(AllocationSpan(index, at - found.address, upto - at))
            at = upto
        return spans

    def _index(self, device: int, address: int) -> int:
        """Returns the index of the allocation that is mapped at an address."""
        for index, known in enumerate(self._found):
            if known.address <= address < known.address + known.nbytes:
                return index
        found = self._driver.find(device, address)
        if found is None:
            raise DataPathUnavailable("memory of cudaMalloc cannot be exported as descriptors; nixl may reach it")
        self._found.append(found)
        if not found.exports:
            raise DataPathUnavailable(
                "this memory was allocated without a handle type of file descriptors"
                " (CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR); nixl may reach it"
            )
        if not found.whole or not found.address <= address < found.address + found.nbytes:
            raise DataPathUnavailable(
                "the driver takes a range of several allocations for one: map each apart from the others; nixl may"
                " reach it"
            )
        if len(self._found) > ALLOCATIONS_MAX:
            raise DataPathUnavailable(
                f"this memory consists of more than {ALLOCATIONS_MAX} allocations, which is what one answer carries:"
                " make them larger; nixl may reach it"
            )
        return len(self._found) - 1

    def _check_overlaps(self) -> None:
        """Raises DataPathUnavailable if spans overlap: `_check_rest` would count their bytes twice."""
        for one, other in itertools.pairwise(sorted(self.spans, key=lambda span: (span.allocation, span.offset))):
            if one.allocation == other.allocation and one.offset + one.nbytes > other.offset:
                raise DataPathUnavailable("segments of this memory overlap: name each byte once; nixl may reach it")

    def _check_rest(self, unit: int) -> None:
        """Raises DataPathUnavailable if an allocation has more bytes than the pool's."""
        rests = [found.nbytes for found in self._found]
        for span in self.spans:
            rests[span.allocation] -= span.nbytes
        for found, rest in zip(self._found, rests, strict=True):
            if rest >= unit:
                raise DataPathUnavailable(
                    f"{rest} bytes of an allocation of {found.nbytes} are not the pool's, and peers would see them:"
                    " give the pool allocations of its own; nixl may reach it"
                )

    def _release(self) -> None:
        with contextlib.ExitStack() as rest:
            while self._found:
                rest.callback(self._driver.release, self._found.pop().handle)
