"""Memory for a store on the device where the engine computes. On GPUs tensors move from device to device."""

import torch

from kvgrpc.engine.cuda_memory import CudaMemory
from kvgrpc.integrations.vllm.geometry import unserved


class StoreMemory:
    """The memory of one store: `nbytes` bytes of a device, in `tensor`, until `close`. Peers on the same host read a
    GPU's memory by descriptors, if the driver can make them.

    Raises ValueError for a device that is neither the host nor a CUDA GPU, and the errors of CudaMemory.
    """

    tensor: torch.Tensor

    def __init__(self, device: torch.device, nbytes: int) -> None:
        if device.type not in ("cpu", "cuda"):
            raise unserved(f"stores on GPUs of CUDA; this engine computes on {device}", "leave `store_on_device` unset")
        self._made = None if device.type == "cpu" else CudaMemory(str(device), nbytes, exported=True)
        self.tensor = torch.zeros(nbytes, dtype=torch.uint8) if self._made is None else self._made.tensor

    def close(self) -> None:
        """Frees memory of a GPU. Nothing may use `tensor` any more. Idempotent."""
        if self._made is not None:
            self._made.close()
