"""Torch tensors of one CUDA device behind a mirror in host memory, for GPUs whose memory no data path reaches.

Copies run on two streams of their own, one per direction, beside the streams that compute. Copies see what the engine's
finished steps have written: a rank reports a step once the device is past it.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvgrpc.core.values.block_ids import Ids
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import Segment
from kvgrpc.datapath.host.addresses import cut_at_ends
from kvgrpc.datapath.host.memory import PrivateMemory, memory_bytes
from kvgrpc.errors import InvalidRequest, PreconditionFailed, Reason

_log = logging.getLogger(__name__)
_cuda: Any = torch.cuda  # untyped in part
_OK = 0
_PORTABLE = 1
"""Flag of cudaHostRegister: memory is page-locked for every context of the process."""


class CudaDevice:
    """A `Device` of dense tensors on one CUDA device, in the order of the pool's linear offsets. The tensors must stay
    where they are while it is used. Raises InvalidRequest for other tensors.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        segments = PrivateMemory.of(*tensors).segments
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1 or not tensors[0].is_cuda:
            raise InvalidRequest(
                Reason.INVALID_FIELD, f"tensors of one CUDA device, not of {sorted(map(str, devices))}"
            )
        self._device = tensors[0].device
        self._bytes = [bytes_of(tensor, segment) for tensor, segment in zip(tensors, segments, strict=True)]
        self._ends = np.cumsum([segment.nbytes for segment in segments])
        self._host: torch.Tensor | None = None
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self.nbytes = memory_bytes(segments)

    def open(self, mirror: NDArray[np.uint8]) -> None:
        """Page-locks the mirror. Raises PreconditionFailed (FEATURE_UNAVAILABLE) if that is not possible."""
        with torch.cuda.device(self._device):
            self._streams = _cuda.Stream(), _cuda.Stream()
            answer = int(_cuda.cudart().cudaHostRegister(mirror.ctypes.data, mirror.nbytes, _PORTABLE))
        if answer != _OK:
            what = f"{mirror.nbytes} bytes of host memory could not be page-locked: CUDA error {answer}"
            raise PreconditionFailed(Reason.FEATURE_UNAVAILABLE, what)
        self._host = torch.from_numpy(mirror)

    def to_host(self, offsets: Ids, nbytes: Ids) -> torch.cuda.Event:
        return self._copy(offsets, nbytes, out=True)

    def to_device(self, offsets: Ids, nbytes: Ids) -> torch.cuda.Event:
        return self._copy(offsets, nbytes, out=False)

    def close(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            with torch.cuda.device(self._device):
                answer = int(_cuda.cudart().cudaHostUnregister(host.data_ptr()))
            if answer != _OK:
                _log.error("%d bytes of host memory stay page-locked: CUDA error %d", host.numel(), answer)

    def _copy(self, offsets: Ids, nbytes: Ids, *, out: bool) -> torch.cuda.Event:
        assert self._host is not None, "it has no mirror"
        assert self._streams is not None
        stream = self._streams[0] if out else self._streams[1]
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            for host, device in pairs(self._host, self._bytes, self._ends, offsets, nbytes):
                (host if out else device).copy_(device if out else host, non_blocking=True)
            done: torch.cuda.Event = _cuda.Event(blocking=True)  # waiting for it takes no CPU time
            done.record(stream)
        return done


def pairs(
    host: torch.Tensor, tensors: Sequence[torch.Tensor], ends: Ids, offsets: Ids, nbytes: Ids
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns each run as bytes of the mirror and of its tensor, which ends at one of `ends`. A run that lies in
    several tensors is cut.
    """
    runs = cut_at_ends(Runs(offsets, offsets, nbytes), ends)
    index = np.searchsorted(ends, runs.src, side="right")
    begins = ends[index] - np.array([len(tensor) for tensor in tensors])[index]
    rows = zip(index.tolist(), runs.src.tolist(), (runs.src - begins).tolist(), runs.nbytes.tolist(), strict=True)
    return [(host[at : at + count], tensors[i][within : within + count]) for i, at, within, count in rows]


def bytes_of(tensor: torch.Tensor, segment: Segment) -> torch.Tensor:
    """Returns a dense tensor as bytes in memory order, whatever the order of its dimensions."""
    storage = tensor.untyped_storage()
    first = segment.address - storage.data_ptr()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, first, (segment.nbytes,), (1,))
