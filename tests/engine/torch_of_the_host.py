"""A fake torch whose device is the host's memory."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import torch

from kvgrpc.datapath.cuda_vmm.memory import VmmMemory


class OfTheHost:
    """A fake torch whose device is the host's memory. tests/gpu has the tests that need a GPU."""

    __version__ = "0"
    OutOfMemoryError, uint8, cat = torch.OutOfMemoryError, torch.uint8, staticmethod(torch.cat)

    def __init__(self) -> None:
        self.emptied = 0
        self.cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1, synchronize=lambda _: None)
        self.cuda.device, self.cuda.empty_cache = nullcontext, self._empty

    def zeros(self, nbytes: int, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        assert device == "cuda:0"
        return torch.zeros(nbytes, dtype=dtype)

    def as_tensor(self, memory: VmmMemory, *, device: str) -> torch.Tensor:
        """Returns a tensor that keeps the memory alive, like torch does."""
        return torch.from_numpy(
            np.asarray(SimpleNamespace(__array_interface__=memory.__cuda_array_interface__, of=memory))
        )

    def _empty(self) -> None:
        self.emptied += 1
