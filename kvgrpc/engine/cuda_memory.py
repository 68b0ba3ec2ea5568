"""Memory of a CUDA device: for a server's own pool, and for engines that let peers on their host read theirs.

Torch makes the memory. The driver makes it if descriptors are to be given to peers (data path `cuda_vmm`).
"""

import contextlib
import itertools
import logging
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvgrpc.datapath.base import DataPathUnavailable
from kvgrpc.datapath.cuda_vmm import libcuda
from kvgrpc.datapath.cuda_vmm.driver import DriverError
from kvgrpc.datapath.cuda_vmm.memory import VmmAllocation, VmmMemory
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.mirror.device import CopyFailed, Device
from kvgrpc.errors import Exhausted, FieldViolation, InvalidRequest, PreconditionFailed, Reason

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)
_INSTEAD = "or set pool.device to host"


class CudaMemory:
    """A `DeviceMemory`: one tensor of `nbytes` bytes on `device`, which is "cuda:" and a number. With `exported` it is
    an allocation of its own, whose descriptors can be given to peers, if the driver makes such memory. Memory that
    nobody closed is freed with its last tensor.

    Raises PreconditionFailed (FEATURE_UNAVAILABLE) without torch or a driver that it can use, InvalidRequest for a
    device that this machine lacks, Exhausted (POOL_EXHAUSTED) if the device has too little memory left.
    """

    tensor: "torch.Tensor"
    """The memory, shape [nbytes], uint8, zeros at first. Nothing may use it after `close`."""

    def __init__(self, device: str, nbytes: int, *, exported: bool = False) -> None:
        self.name = device
        self._torch = _torch(device)
        self._lock = threading.Lock()  # serializes `read` and `close`
        self._closed = False
        self._give_back: weakref.finalize[..., VmmMemory] | None = None
        self._exported = self._export(nbytes) if exported else None
        with contextlib.ExitStack() as undo:
            if self._give_back is not None:
                undo.callback(self._give_back)
            try:
                self.tensor = self._made(nbytes)
                # The memory must be filled before any other stream, or NIXL, touches it.
                self._torch.cuda.synchronize(device)
            except self._torch.OutOfMemoryError as error:
                raise Exhausted(
                    Reason.POOL_EXHAUSTED, f"a pool of {nbytes} bytes does not fit {device}: {_first_line(error)}"
                ) from error
            except RuntimeError as error:
                raise _unusable(device, f"it cannot be used: {_first_line(error)}") from error
            undo.pop_all()
        self.memory = self._exported or PrivateMemory.of(self.tensor)

    def _made(self, nbytes: int) -> "torch.Tensor":
        if self._exported is None:
            return self._torch.zeros(nbytes, dtype=self._torch.uint8, device=self.name)  # type: ignore[no-any-return]
        return self._torch.as_tensor(self._exported, device=self.name).zero_()  # type: ignore[no-any-return]

    def _export(self, nbytes: int) -> VmmMemory | None:
        """Makes memory whose descriptors peers can get. Returns None if the driver cannot: torch makes it then."""
        try:
            made = VmmMemory(libcuda.load(), int(self.name.removeprefix("cuda:")), nbytes)
        except (DriverError, DataPathUnavailable) as error:
            _log.warning("no descriptors of memory of %s can be given to peers: %s", self.name, error.message)
            return None
        self._give_back = weakref.finalize(made, _free, made.allocation, self._torch, self.name)
        self._give_back.atexit = False  # at exit the driver frees it, after everything that uses it
        return made

    def use(self) -> None:
        self._torch.cuda.set_device(self.name)

    def device(self) -> Device:
        from kvgrpc.engine.cuda import CudaDevice

        return CudaDevice([self.tensor])

    def read(self, runs: Sequence[tuple[int, int]]) -> list[bytes]:
        """Gathers the runs on the device, and copies them to the host once."""
        try:
            with self._lock, self._torch.cuda.device(self.name):
                if self._closed:
                    raise CopyFailed(f"the pool on {self.name} was given back")
                if not runs:
                    return []
                whole = self._torch.cat([self.tensor[offset : offset + nbytes] for offset, nbytes in runs])
                data = whole.cpu().numpy().tobytes()
        except RuntimeError as error:
            raise CopyFailed(f"{self.name} cannot be read: {_first_line(error)}") from error
        ends = [0]
        for _, nbytes in runs:
            ends.append(ends[-1] + nbytes)
        return [data[first:end] for first, end in itertools.pairwise(ends)]

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                if self._give_back is not None:
                    self._give_back()
                    return
                # Something may still refer to the tensor, and torch would keep freed memory in its cache.
                self.tensor.untyped_storage().resize_(0)
                self._torch.cuda.empty_cache()


def _free(allocation: VmmAllocation, torch: Any, device: str) -> None:
    """Frees an allocation once the device is past all its work. Memory that it may still use is kept for good."""
    try:
        torch.cuda.synchronize(device)
        allocation.free()
    except (RuntimeError, DriverError) as error:
        _log.error("memory of %s is not given back: %s", device, _first_line(error))


def _torch(device: str) -> Any:
    """Returns torch, if it finds the device. Raises as `CudaMemory` does."""
    try:
        import torch
    except ImportError as error:
        raise _unusable(device, f"torch cannot be imported ({error}): install torch with CUDA") from error
    if not torch.cuda.is_available():
        raise _unusable(
            device,
            f"torch {torch.__version__} finds no CUDA device: install a driver, and a torch for it, show this process "
            "its GPUs",
        )
    count = torch.cuda.device_count()
    if int(device.removeprefix("cuda:")) >= count:
        wrong = FieldViolation("pool.device", f"{device} is not there: torch finds {count}, from cuda:0 on")
        raise InvalidRequest(Reason.INVALID_FIELD, "the configuration is not usable", violations=(wrong,))
    return torch


def _unusable(device: str, why: str) -> PreconditionFailed:
    return PreconditionFailed(Reason.FEATURE_UNAVAILABLE, f"pool.device is {device}, but {why}, {_INSTEAD}")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
