"""Interface between a server and the device on which its own pool lies."""

from collections.abc import Sequence
from typing import Protocol

from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.mirror.device import Device


class DeviceMemory(Protocol):
    """Memory of a device for a pool, initially zeros, whose address is fixed until `close`."""

    @property
    def name(self) -> str:
        """Name of the device, such as "cuda:0"."""

    @property
    def memory(self) -> PrivateMemory:
        """The memory for data paths that reach it."""

    def use(self) -> None:
        """Makes the libraries that the calling thread calls work on this device."""

    def device(self) -> Device:
        """Returns the device for a mirror, for data paths that do not reach its memory."""

    def read(self, runs: Sequence[tuple[int, int]]) -> list[bytes]:
        """Returns the bytes of runs, each an offset and a length, and waits for the device. Raises CopyFailed, also
        after `close`. Any thread may call it, also while others copy.
        """

    def close(self) -> None:
        """Gives the memory back to the device, for other processes. Nothing copies any more. Idempotent."""


class MakeDeviceMemory(Protocol):
    """Makes memory of a device."""

    def __call__(self, device: str, nbytes: int, *, exported: bool) -> DeviceMemory:
        """Allocates memory. With `exported`, peers on this host can get descriptors of it, if the driver has such
        memory.

        Raises InvalidRequest if there is no such device, PreconditionFailed if its memory cannot be used from here,
        Exhausted if it has too little memory.
        """
