"""Memory outside the store: plain memory of the lead, allocated once, that no data path reaches."""

import logging
import mmap
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

_log = logging.getLogger(__name__)
Memory = NDArray[np.uint8]


class SpillMemory:
    """Memory of `pages` pages. `store` returns the pool's memory, or None if this process does not have it."""

    def __init__(self, pages: int, page_bytes: int, store: Callable[[], Memory | None]) -> None:
        self._page_bytes = page_bytes
        self._store = store
        # The system zeroes pages on first use: a spill that is never used costs nothing.
        self._pages: Memory | None = None
        if pages:
            try:
                mapping = mmap.mmap(-1, pages * page_bytes)
            except OSError as error:  # the server's start checked that it fits
                _log.error("nothing is spilled: %d bytes did not fit: %s", pages * page_bytes, error)
            else:
                self._pages = np.frombuffer(mapping, dtype=np.uint8).reshape(pages, page_bytes)

    @property
    def usable(self) -> bool:
        """True if tensors can be copied there."""
        return self._pages is not None and self._store() is not None

    def copier(self, pages: Sequence[int], slots: Sequence[int], *, out: bool) -> Callable[[], None]:
        """Returns a function, for a thread, that copies pages of the store out to the slots, or back."""
        memory, spill = self._store(), self._pages
        assert memory is not None, "it is usable"
        assert spill is not None, "it is usable"
        store = memory[: len(memory) // self._page_bytes * self._page_bytes].reshape(-1, self._page_bytes)

        def copy() -> None:
            for page, slot in zip(pages, slots, strict=True):
                if out:
                    spill[slot] = store[page]
                else:
                    store[page] = spill[slot]

        return copy
