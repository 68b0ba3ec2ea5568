"""Servers whose own pool lies on a device that is none: its memory is a file, which a test reads and writes, too."""

import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvgrpc.core.values.endpoints import MemoryKind, Segment
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.server import Server
from tests.engine.mirrored.fake_device import FakeDevice
from tests.service.engines import LAYER_BYTES, Engine
from tests.service.forks import INSIDE

REACHED = "TESTS_DEVICE_IS_REACHED"


class UnreachedMemory:
    """No data path reaches it: the real NIXL refuses memory of a GPU where its UCX knows none."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.name = name
        self._device = FakeDevice(nbytes=nbytes)
        self.memory = self._as_known()
        self.closed = False

    def _as_known(self) -> PrivateMemory:
        """What data paths are told of it."""
        nowhere = np.zeros(self._device.nbytes, dtype=np.uint8)
        segment = Segment(nowhere.ctypes.data, nowhere.nbytes, MemoryKind.CUDA, int(self.name.removeprefix("cuda:")))
        return PrivateMemory([segment], owners=nowhere)

    def use(self) -> None:
        """Nothing works on it."""

    def device(self) -> FakeDevice:
        return self._device

    def close(self) -> None:
        assert not self._device.has_mirror
        self.closed = True

    def put(self, device: FakeDevice) -> None:
        """In the place of its own."""
        self._device = device

    def read(self, runs: Sequence[tuple[int, int]]) -> list[bytes]:
        whole = self._device.read_all()
        return [whole[offset : offset + nbytes].tobytes() for offset, nbytes in runs]


class ReachedMemory(UnreachedMemory):
    """The real NIXL reaches it, since it is the host's."""

    def _as_known(self) -> PrivateMemory:
        return PrivateMemory.of(np.frombuffer(mmap.mmap(self._device.fd, self._device.nbytes), dtype=np.uint8))


def install() -> None:
    """Every server of this process has such devices from now on."""
    defaults: dict[str, Any] = Server.__init__.__kwdefaults__ or {}
    assert "device_memory" in defaults
    defaults["device_memory"] = ReachedMemory if os.environ.get(REACHED) else UnreachedMemory


def environment(*, reached: bool) -> dict[str, str]:
    """Of a server that has them."""
    return {INSIDE: __name__, REACHED: "1" if reached else ""}


class DeviceEngine(Engine):
    """An engine whose blocks a test writes, and looks at, in the device's memory."""

    def on_device(self, ids: Sequence[int], layers: int) -> list[bytes]:
        """The bytes of blocks, layer after layer."""
        found: list[bytes] = []

        def look(fd: int, at: int) -> None:
            found.append(os.pread(fd, LAYER_BYTES, at))

        for block in ids:
            for layer in range(layers):
                self._memory(layer, block, look)
        return [b"".join(found[i * layers : (i + 1) * layers]) for i in range(len(ids))]

    def _memory(self, layer: int, block: int, use: Callable[[int, int], object]) -> None:
        folder = Path(f"/proc/{self.process.pid}/fd")
        paths = [link for link in folder.iterdir() if "memfd:device" in str(link.readlink())]
        fd = os.open(paths[0], os.O_RDWR)  # a mapping has another descriptor of the same file
        try:
            use(fd, (layer * self._blocks + block) * LAYER_BYTES)
        finally:
            os.close(fd)
