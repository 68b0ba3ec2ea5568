"""Memory of a GPU that cannot be had is refused with what to do. With a GPU: tests/gpu."""

import ctypes
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvgrpc.datapath.cuda_vmm import libcuda
from kvgrpc.datapath.cuda_vmm.memory import VmmMemory
from kvgrpc.engine import CopyFailed
from kvgrpc.engine.cuda_memory import CudaMemory
from kvgrpc.errors import Exhausted, InvalidRequest, PreconditionFailed, Reason
from tests.datapath.cuda_vmm.fake_driver import FakeDriver, view


class Full:
    """A torch with two devices whose memory is taken, or that the driver refuses."""

    __version__ = "0"
    OutOfMemoryError = torch.OutOfMemoryError
    uint8 = torch.uint8
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)

    def __init__(self, error: Exception) -> None:
        self._error = error

    def zeros(self, *_: Any, **__: Any) -> None:
        raise self._error


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(PreconditionFailed) as found:
        CudaMemory("cuda:0", 1)
    assert found.value.reason is Reason.FEATURE_UNAVAILABLE
    assert "install torch with CUDA, or set pool.device to host" in str(found.value)


def test_a_number_that_no_device_has_is_refused_by_the_name_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", Full(RuntimeError()))
    with pytest.raises(InvalidRequest) as found:
        CudaMemory("cuda:2", 1)
    (violation,) = found.value.violations
    assert violation.field == "pool.device"
    assert violation.description == "cuda:2 is not there: torch finds 2, from cuda:0 on"


@pytest.mark.parametrize(
    ("error", "reason", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nmore"), Reason.POOL_EXHAUSTED, Exhausted),
        (RuntimeError("device busy\nmore"), Reason.FEATURE_UNAVAILABLE, PreconditionFailed),
    ],
)
def test_a_device_that_gives_no_memory_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: Reason, kind: Any
) -> None:
    monkeypatch.setitem(sys.modules, "torch", Full(error))
    with pytest.raises(kind) as found:
        CudaMemory("cuda:1", 4096)
    assert found.value.reason is reason
    assert str(error).partition("\n")[0] in str(found.value)
    assert "more" not in str(found.value)


class OfTheHost:
    """A torch whose device is the host's memory. With a GPU: tests/gpu."""

    __version__ = "0"
    OutOfMemoryError, uint8, cat = torch.OutOfMemoryError, torch.uint8, staticmethod(torch.cat)

    def __init__(self) -> None:
        self.emptied = 0
        self.cuda = SimpleNamespace(
            is_available=lambda: True, device_count=lambda: 1, synchronize=lambda _: None, device=nullcontext,
            empty_cache=self._empty,
        )  # fmt: skip

    def zeros(self, nbytes: int, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        assert device == "cuda:0"
        return torch.zeros(nbytes, dtype=dtype)

    def as_tensor(self, memory: VmmMemory, *, device: str) -> torch.Tensor:
        (segment,) = memory.segments
        return torch.from_numpy(view(segment.address, segment.nbytes))

    def _empty(self) -> None:
        self.emptied += 1


def test_runs_are_read_as_asked_until_the_memory_is_given_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library = OfTheHost()
    monkeypatch.setitem(sys.modules, "torch", library)
    pool = CudaMemory("cuda:0", 1 << 16)
    assert pool.read([(0, 1 << 16)]) == [bytes(1 << 16)]
    (segment,) = pool.memory.segments
    whole = np.random.default_rng(1).bytes(1 << 16)
    ctypes.memmove(segment.address, whole, len(whole))
    runs = [(1 << 15, 4096), (0, 1), (7, 100), (1 << 15, 2)]
    assert pool.read(runs) == [whole[offset : offset + nbytes] for offset, nbytes in runs]
    assert pool.read([]) == []
    for _ in range(2):
        pool.close()
    assert library.emptied == 1
    with pytest.raises(CopyFailed, match="given back"):
        pool.read(runs)


def test_exported_memory_is_an_allocation_of_the_drivers_until_it_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeDriver()
    monkeypatch.setitem(sys.modules, "torch", OfTheHost())
    monkeypatch.setattr(libcuda, "load", lambda: driver)
    pool = CudaMemory("cuda:0", 100_000, exported=True)
    assert isinstance(pool.memory, VmmMemory)
    assert [segment.nbytes for segment in pool.memory.segments] == [100_000]
    assert driver.left == (1, 1)
    pool.tensor[7] = 9
    assert pool.read([(6, 3)]) == [b"\0\t\0"]
    pool.memory.close()
    assert pool.read([(7, 1)]) == [b"\t"], "its rank has let go, and others may look still"
    for _ in range(2):
        pool.close()
    assert driver.left == (0, 0)
    with pytest.raises(CopyFailed, match="given back"):
        pool.read([(7, 1)])


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_where_the_driver_has_no_such_memory_it_is_torchs_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    driver = FakeDriver()
    driver.failing[call] = "CUDA_ERROR_NOT_SUPPORTED"
    monkeypatch.setitem(sys.modules, "torch", OfTheHost())
    monkeypatch.setattr(libcuda, "load", lambda: driver)
    pool = CudaMemory("cuda:0", 4096, exported=True)
    assert not isinstance(pool.memory, VmmMemory)
    assert f"no descriptors of memory of cuda:0 can be given to peers: {call}: CUDA_ERROR_NOT_SUPPORTED" in caplog.text
    assert driver.left == (0, 0)
    pool.close()
