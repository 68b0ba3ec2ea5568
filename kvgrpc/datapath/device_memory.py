"""The seam between a server and the device on which its own pool lies."""

from collections.abc import Sequence
from typing import Protocol

from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.mirror.device import Device


class DeviceMemory(Protocol):
    """Memory of a device, made for a pool, of zeros. It stays where it is until it is closed."""

    @property
    def name(self) -> str:
        """Of the device, as in "cuda:0"."""
        ...

    @property
    def memory(self) -> PrivateMemory:
        """For data paths that reach it."""
        ...

    def use(self) -> None:
        """From now on the libraries that the calling thread calls work on that device."""
        ...

    def device(self) -> Device:
        """For a mirror, where none does."""
        ...

    def read(self, runs: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of runs, each an offset and a length; waits for the device. Raises CopyFailed, also once it is
        closed. Any thread may ask, also while others copy.
        """
        ...

    def close(self) -> None:
        """Gives the memory back to the device, for other processes: nothing copies any more. Idempotent."""
        ...


class MakeDeviceMemory(Protocol):
    """Makes memory of a device."""

    def __call__(self, device: str, nbytes: int, *, exported: bool) -> DeviceMemory:
        """`exported`: so that peers on this host can be given descriptors of it, if the driver has such memory.

        Raises InvalidRequest where there is no such device, PreconditionFailed where its memory cannot be used from
        here, Exhausted where there is not so much of it.
        """
        ...
