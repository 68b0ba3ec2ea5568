"""Servers whose own pool lies on a fake device. The device's memory is a file, which a test also reads and writes."""

import mmap
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import numpy as np

from kvgrpc.core.values.endpoints import MemoryKind, Segment
from kvgrpc.datapath.cuda_vmm.memory import VmmMemory
from kvgrpc.datapath.device_memory import MakeDeviceMemory
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.server import Server
from tests.datapath.cuda_vmm.fake_driver import DRIVER, view
from tests.engine.mirrored.fake_device import FakeDevice
from tests.service.engines import LAYER_BYTES, Engine
from tests.service.forks import INSIDE

REACHED = "TESTS_DEVICE_IS_REACHED"


class UnreachedMemory:
    """Memory that no data path reaches: the real NIXL refuses GPU memory where its UCX knows no GPU."""

    def __init__(self, device: str, nbytes: int, *, exported: bool = False) -> None:
        self.name = device
        self._device = FakeDevice(nbytes=nbytes)
        self.memory = self._as_known()
        self.closed = False

    def _as_known(self) -> PrivateMemory:
        """Returns the memory as data paths see it."""
        nowhere = np.zeros(self._device.nbytes, dtype=np.uint8)
        segment = Segment(nowhere.ctypes.data, nowhere.nbytes, MemoryKind.CUDA, int(self.name.removeprefix("cuda:")))
        return PrivateMemory([segment], owners=nowhere)

    def use(self) -> None:
        """Does nothing: there is no device to select."""

    def device(self) -> FakeDevice:
        return self._device

    def close(self) -> None:
        assert not self._device.has_mirror
        self.closed = True

    def put(self, device: FakeDevice) -> None:
        """Replaces the memory's device."""
        self._device = device

    def read(self, runs: Sequence[tuple[int, int]]) -> list[bytes]:
        whole = self._device.read_all()
        return [whole[offset : offset + nbytes].tobytes() for offset, nbytes in runs]


class ReachedMemory(UnreachedMemory):
    """Memory that the real NIXL reaches, because it is host memory."""

    def _as_known(self) -> PrivateMemory:
        return PrivateMemory.of(np.frombuffer(mmap.mmap(self._device.fd, self._device.nbytes), dtype=np.uint8))


class ExportedPool:
    """Memory of a fake GPU driver, whose descriptors peers get. It has no mirror."""

    def __init__(self, device: str, nbytes: int, *, exported: bool) -> None:
        assert exported, "the configuration has the data path"
        self.name = device
        self.memory = VmmMemory(DRIVER, int(device.removeprefix("cuda:")), nbytes)
        (segment,) = self.memory.segments
        self._bytes = view(segment.address, segment.nbytes)

    def use(self) -> None:
        """Does nothing: there is no device to select."""

    def device(self) -> NoReturn:
        raise AssertionError("its data path reaches it")

    def close(self) -> None:
        self.memory.free()

    def read(self, runs: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self._bytes[offset : offset + nbytes].tobytes() for offset, nbytes in runs]


POOLS: dict[str, MakeDeviceMemory] = {"": UnreachedMemory, "reached": ReachedMemory, "exported": ExportedPool}
"""Value of the variable `REACHED` -> maker of memory."""


def install() -> None:
    """Gives every later server of this process such memory."""
    defaults: dict[str, Any] = Server.__init__.__kwdefaults__ or {}
    assert "device_memory" in defaults
    kind = os.environ.get(REACHED, "")
    defaults["device_memory"] = POOLS[kind]
    if kind == "exported":  # torch sets each thread's device, and no GPU exists here
        sys.modules["torch"] = ModuleType("torch")
        sys.modules["torch"].cuda = SimpleNamespace(set_device=lambda _: None)  # type: ignore[attr-defined]


def environment(reached: str) -> dict[str, str]:
    """Returns the environment of a server with such memory: see `POOLS`."""
    return {INSIDE: __name__, REACHED: reached}


class DeviceEngine(Engine):
    """An engine whose blocks a test reads and writes in the device's memory."""

    def on_device(self, ids: Sequence[int], layers: int) -> list[bytes]:
        """Returns the bytes of each block, layer after layer."""
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
        fd = os.open(paths[0], os.O_RDWR)  # a mapping's descriptor opens the same file, so any one will do
        try:
            use(fd, (layer * self._blocks + block) * LAYER_BYTES)
        finally:
            os.close(fd)
