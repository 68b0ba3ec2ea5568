"""Memory for a store where the engine computes: of a GPU, so that tensors go from device to device."""

import torch

from kvgrpc.engine.cuda_memory import CudaMemory
from kvgrpc.integrations.vllm.geometry import unserved


class StoreMemory:
    """`nbytes` bytes of a device, in `tensor`, until it is closed. Of a GPU it is memory that peers on its host read by
    descriptors, where the driver has such.

    Raises ValueError for a device that is neither the host nor a GPU of CUDA, and what CudaMemory raises.
    """

    tensor: torch.Tensor

    def __init__(self, device: torch.device, nbytes: int) -> None:
        if device.type not in ("cpu", "cuda"):
            raise unserved(f"stores on GPUs of CUDA; this engine computes on {device}", "leave `store_on_device` unset")
        self._made = None if device.type == "cpu" else CudaMemory(str(device), nbytes, exported=True)
        self.tensor = torch.zeros(nbytes, dtype=torch.uint8) if self._made is None else self._made.tensor

    def close(self) -> None:
        """Nothing uses it any more. Idempotent."""
        if self._made is not None:
            self._made.close()
