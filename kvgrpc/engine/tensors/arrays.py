"""Copies between tensors and pages of a store. A tensor is a numpy array, or a torch tensor on any device. The store's
memory is a numpy array, or a torch tensor of bytes on any device.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvgrpc.core.tensors.descriptions import DTYPES, Description
from kvgrpc.errors import invalid

Bytes = NDArray[np.uint8] | torch.Tensor
AnyTensor = Any
"""A numpy array or a torch tensor."""


def describe(tensor: AnyTensor, layer: int | None, content_digest: bytes) -> Description:
    """Returns the description of a tensor. Raises InvalidRequest if it is no tensor, or cannot be moved."""
    if not isinstance(tensor, np.ndarray | torch.Tensor):
        raise invalid("tensor", "is a numpy array or a torch tensor")
    return replace(described_as(tensor.shape, tensor.dtype), layer=layer, content_digest=content_digest)


def described_as(shape: Sequence[int], dtype: Any) -> Description:
    """Returns the description of a tensor. `dtype`: an element type of numpy or torch, or its name. Raises
    InvalidRequest for a tensor that cannot be moved.
    """
    name = dtype if isinstance(dtype, str) else str(np.dtype(dtype) if isinstance(dtype, type) else dtype)
    name, sizes = name.removeprefix("torch."), tuple(int(size) for size in shape)
    return Description(name, sizes, DTYPES.get(name, 0) * int(np.prod(sizes, dtype=object)))


def when_computed(tensor: AnyTensor) -> Callable[[], None]:
    """Returns a function that waits for what is queued by now on this thread's current stream of a tensor's device."""
    if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
        cuda: Any = torch.cuda  # untyped in part
        event = cuda.Event()
        event.record(cuda.current_stream(tensor.device))
        wait: Callable[[], None] = event.synchronize
        return wait
    return lambda: None


def copy_in(tensor: AnyTensor, store: Bytes, pages: Sequence[int], page_bytes: int) -> None:
    """Copies a tensor's elements, side by side, into these pages of the store. Returns when the copy is done."""
    nbytes = tensor.nbytes
    run = _run(store, pages, page_bytes, nbytes)
    whole: Any = _new(store, nbytes) if run is None else run
    _fill(whole, tensor)
    for page, start in zip(pages, range(0, nbytes, page_bytes), strict=True) if run is None else ():
        piece = whole[start : start + page_bytes]
        store[page * page_bytes : page * page_bytes + len(piece)] = piece
    when_computed(store)()


def read(store: Bytes, pages: Sequence[int], page_bytes: int, nbytes: int) -> tuple[Bytes, bool]:
    """Returns the bytes of these pages, and whether they are a view of the store. They are a copy if the pages do not
    lie side by side.
    """
    run = _run(store, pages, page_bytes, nbytes)
    if run is not None:
        return run, True
    whole: Any = _new(store, len(pages) * page_bytes)
    for row, page in zip(whole.reshape(-1, page_bytes), pages, strict=True):
        row[:] = store[page * page_bytes : (page + 1) * page_bytes]
    when_computed(store)()
    return whole[:nbytes], False


def room(store: Bytes, pages: Sequence[int], page_bytes: int, nbytes: int) -> tuple[Bytes, bool]:
    """Returns memory for `nbytes` bytes, and whether it is these pages. It is other memory if the pages do not lie side
    by side. The memory is not cleared.
    """
    run = _run(store, pages, page_bytes, nbytes)
    return (_new(store, nbytes), False) if run is None else (run, True)


def as_array(data: Bytes, what: Description) -> NDArray[Any]:
    """Returns these bytes as an array, without a copy. Raises TypeError on a device, and for types that numpy lacks."""
    if isinstance(data, torch.Tensor):
        if data.is_cuda:
            raise TypeError("it lies on a device, where numpy reads nothing: use torch()")
        data = data.numpy()
    return data.view(np.dtype(what.dtype)).reshape(what.shape)


def as_tensor(data: Bytes, what: Description) -> torch.Tensor:
    """Returns these bytes as a tensor, without a copy."""
    whole = data if isinstance(data, torch.Tensor) else torch.from_numpy(data)
    return whole.view(getattr(torch, what.dtype)).view(what.shape)


def _new(store: Bytes, nbytes: int) -> Bytes:
    """Returns memory outside the store, on the same device."""
    if isinstance(store, torch.Tensor):
        return store.new_empty(nbytes)
    return np.empty(nbytes, dtype=np.uint8)


def _run(store: Bytes, pages: Sequence[int], page_bytes: int, nbytes: int) -> Bytes | None:
    if pages[-1] - pages[0] != len(pages) - 1:
        return None
    first = pages[0] * page_bytes
    return store[first : first + nbytes]


def _fill(into: Bytes, tensor: AnyTensor) -> None:
    if isinstance(tensor, torch.Tensor):
        whole = into if isinstance(into, torch.Tensor) else torch.from_numpy(into)
        whole.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    elif isinstance(into, torch.Tensor):
        into.copy_(torch.from_numpy(np.array(tensor, order="C").reshape(-1).view(np.uint8)))
    else:
        np.copyto(into.view(tensor.dtype).reshape(tensor.shape), tensor)
