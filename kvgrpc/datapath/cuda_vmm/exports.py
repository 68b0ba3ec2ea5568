"""A rank's own memory of a GPU as descriptors for peers: what it is made of, and a nonce that proves it.

A peer maps whole allocations. So each is to be the pool's alone but for the unit that sizes are rounded up to: what
else an engine has on its GPU, such as weights, is not shown to anybody.
"""

import contextlib
import os
import secrets
from collections.abc import Sequence

import numpy as np

from kvgrpc.core.values.endpoints import Segment, Span
from kvgrpc.datapath.base import DataPathUnavailable
from kvgrpc.datapath.cuda_vmm.driver import Driver, DriverError, Found
from kvgrpc.datapath.cuda_vmm.memory import VmmMemory
from kvgrpc.datapath.host.memory import NONCE_BYTES
from kvgrpc.datapath.host.process_socket import Reply
from kvgrpc.datapath.questions import DESCRIPTORS_MAX

ALLOCATIONS_MAX = DESCRIPTORS_MAX - 1
"""All go with one answer, and the nonce's."""


class Exports:
    """Of memory of one device. Raises DataPathUnavailable where a peer cannot be given it, with what would do."""

    def __init__(self, driver: Driver, device: int, segments: Sequence[Segment]) -> None:
        self._driver = driver
        self._found: list[Found] = []
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        with contextlib.ExitStack() as undo:
            undo.callback(self._release)
            self.spans = tuple(span for segment in segments for span in self._spans(device, segment))
            self._check_rest(driver.granularity(device))
            self._page = VmmMemory(driver, device, NONCE_BYTES)
            undo.callback(self._page.free)
            written = np.frombuffer(self.nonce, dtype=np.uint8)
            row = (self._page.segments[0].address, written.ctypes.data, NONCE_BYTES)
            driver.copy(device, np.array([row], dtype=np.int64)).synchronize()
            page = driver.find(device, self._page.segments[0].address)
            if page is None or not page.exports:
                raise DataPathUnavailable("the driver does not know again what it allocated")
            self._found.append(page)
            undo.pop_all()

    @property
    def allocations(self) -> tuple[int, ...]:
        """Bytes of each, without the nonce's."""
        return tuple(found.nbytes for found in self._found[:-1])

    def descriptors(self) -> Reply:
        """New ones, the nonce's last. Raises OSError."""
        fds: list[int] = []
        try:
            fds.extend(self._driver.export(found.handle) for found in self._found)
        except DriverError as error:
            for fd in fds:
                os.close(fd)
            raise OSError(f"the driver gives no descriptor: {error.message}") from error
        return Reply(fds=tuple(fds))

    def close(self) -> None:
        """Gives out no more. Idempotent."""
        if self._found:
            self._release()
            self._page.free()

    def _spans(self, device: int, segment: Segment) -> list[Span]:
        spans = []
        at, end = segment.address, segment.address + segment.nbytes
        while at < end:
            index = self._index(device, at)
            found = self._found[index]
            upto = min(end, found.address + found.nbytes)
            spans.append(Span(index, at - found.address, upto - at))
            at = upto
        return spans

    def _index(self, device: int, address: int) -> int:
        """Of the allocation that is mapped there."""
        for index, known in enumerate(self._found):
            if known.address <= address < known.address + known.nbytes:
                return index
        found = self._driver.find(device, address)
        if found is None:
            raise DataPathUnavailable("memory of cudaMalloc cannot be exported as descriptors; nixl reaches it")
        self._found.append(found)
        if not found.exports or not found.address <= address < found.address + found.nbytes:
            raise DataPathUnavailable(
                "this memory was allocated without a handle type of file descriptors"
                " (CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR); nixl reaches it"
            )
        if len(self._found) > ALLOCATIONS_MAX:
            raise DataPathUnavailable(
                f"this memory consists of more than {ALLOCATIONS_MAX} allocations, which is what one answer carries:"
                " make them larger; nixl reaches it"
            )
        return len(self._found) - 1

    def _check_rest(self, unit: int) -> None:
        """Raises DataPathUnavailable where an allocation has more than the pool."""
        for index, found in enumerate(self._found):
            rest = found.nbytes - sum(span.nbytes for span in self.spans if span.allocation == index)
            if rest >= unit:
                raise DataPathUnavailable(
                    f"{rest} bytes of an allocation of {found.nbytes} are not the pool's, and peers would see them:"
                    " give the pool allocations of its own; nixl reaches it"
                )

    def _release(self) -> None:
        while self._found:
            self._driver.release(self._found.pop().handle)
