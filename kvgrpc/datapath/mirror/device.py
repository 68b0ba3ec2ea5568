"""Interface between a mirror and memory that no data path reaches; an integrator implements it."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.values.block_ids import Ids
from kvgrpc.errors import KVGrpcError, Reason


class CopyFailed(KVGrpcError):
    """A device could not copy, and nothing of that copy follows: every byte of its runs is the old one or the new one,
    and no other was written. Any other error proves nothing: what was to be filled stays in quarantine, and the rank
    copies nothing more in that direction.
    """

    def __init__(self, message: str) -> None:
        super().__init__(Reason.DATA_PATH_FAILED, message)


class Copy(Protocol):
    """Copies that a device performs. A `torch.cuda.Event` that was recorded behind them is one."""

    def synchronize(self) -> None:
        """Waits until all bytes are there, visible to every later reader; the interpreter lock is released meanwhile.

        Raises CopyFailed. Called once, by the thread that started the copy.
        """


class Device(Protocol):
    """A rank's memory that only its own copies reach: `nbytes` bytes, in the order of the pool's linear offsets.

    `to_host` and `to_device` are called from two threads, each from one. Both only start copies, which must see the
    writes of the engine's finished steps. Each gets the same offsets in both memories, sorted, of runs that do not
    overlap, of shape [n], int64. Up to two copies per direction are in flight at once, never into the same bytes.
    """

    @property
    def nbytes(self) -> int: ...

    def open(self, mirror: NDArray[np.uint8]) -> None:
        """Takes the mirror, shape [nbytes], for the copies that follow, and page-locks it if that is of use. A rank
        that comes back to a new lead has a new mirror. The rank raises what this raises; the device is not open then.
        """

    def to_host(self, offsets: Ids, nbytes: Ids) -> Copy:
        """Starts to copy into the mirror. Raises CopyFailed."""

    def to_device(self, offsets: Ids, nbytes: Ids) -> Copy:
        """Starts to copy out of the mirror. Raises CopyFailed."""

    def close(self) -> None:
        """Releases the mirror; no copy is in flight. An error is logged, and the mirror stays. Idempotent."""
