"""GPU memory that cannot be had is refused with advice. tests/gpu has the tests that need a GPU."""

import ctypes
import gc
import sys
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
from tests.datapath.cuda_vmm.fake_driver import FakeDriver
from tests.engine.torch_of_the_host import OfTheHost


class Full:
    """A fake torch with two devices that give no memory: it is all taken, or the driver refuses."""

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


class Failing(OfTheHost):
    """A torch whose waits fail with `error`, from the `number`th one on."""

    def __init__(self, error: Exception, number: int) -> None:
        super().__init__()
        self._error, self._left = error, number
        self.cuda.synchronize = self._wait

    def _wait(self, _: str) -> None:
        self._left -= 1
        if self._left <= 0:
            raise self._error


class Refusing(OfTheHost):
    """A torch that refuses to make a tensor of memory."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def as_tensor(self, memory: VmmMemory, *, device: str) -> torch.Tensor:
        raise self._error


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), Exhausted),
        (RuntimeError("device busy"), PreconditionFailed),
        (ValueError("no such interface"), ValueError),
    ],
)
def test_exported_memory_of_which_no_tensor_can_be_made_is_given_back(
    monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception]
) -> None:
    driver = FakeDriver()
    monkeypatch.setitem(sys.modules, "torch", Refusing(error))
    monkeypatch.setattr(libcuda, "load", lambda: driver)
    with pytest.raises(raised) as failed:
        CudaMemory("cuda:0", 4096, exported=True)
    assert driver.left == (0, 0), failed.value


def test_exported_memory_that_may_still_be_filled_is_kept_when_its_start_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = FakeDriver()
    monkeypatch.setitem(sys.modules, "torch", Failing(RuntimeError("unspecified launch failure"), 1))
    monkeypatch.setattr(libcuda, "load", lambda: driver)
    with pytest.raises(PreconditionFailed, match="unspecified launch failure"):
        CudaMemory("cuda:0", 4096, exported=True)
    gc.collect()
    assert driver.left == (1, 1)
    assert "memory of cuda:0 is not given back: unspecified launch failure" in caplog.text


def test_exported_memory_that_may_still_be_used_is_kept_when_it_is_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = FakeDriver()
    monkeypatch.setitem(sys.modules, "torch", Failing(RuntimeError("unspecified launch failure"), 2))
    monkeypatch.setattr(libcuda, "load", lambda: driver)
    pool = CudaMemory("cuda:0", 4096, exported=True)
    for _ in range(2):
        pool.close()
    del pool
    gc.collect()
    assert driver.left == (1, 1)
    assert caplog.text.count("memory of cuda:0 is not given back: unspecified launch failure") == 1


def test_exported_memory_that_nobody_closed_is_given_back_with_its_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setitem(sys.modules, "torch", OfTheHost())
    monkeypatch.setattr(libcuda, "load", lambda: driver)
    pool = CudaMemory("cuda:0", 4096, exported=True)
    part = pool.tensor[8:16]
    del pool
    gc.collect()
    assert driver.left == (1, 1)
    part.fill_(7)
    del part
    gc.collect()
    assert driver.left == (0, 0)
