"""Tensors as bytes: numpy arrays, and torch tensors of any device, into pages of a store and out of them. The store's
memory is an array of the host, or a torch tensor of bytes on any device.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvgrpc.core.tensors.values import DTYPES, Description
from kvgrpc.errors import invalid

Bytes = NDArray[np.uint8] | torch.Tensor
AnyTensor = Any
"""A numpy array or a torch tensor."""


def describe(tensor: AnyTensor, layer: int | None, content_digest: bytes) -> Description:
    """Raises InvalidRequest for what is no tensor, or one that cannot be moved."""
    if not isinstance(tensor, np.ndarray | torch.Tensor):
        raise invalid("tensor", "is a numpy array or a torch tensor")
    return replace(described_as(tensor.shape, tensor.dtype), layer=layer, content_digest=content_digest)


def described_as(shape: Sequence[int], dtype: Any) -> Description:
    """A tensor of this element type: numpy's or torch's, or its name. Raises InvalidRequest for one that cannot be
    moved.
    """
    name = dtype if isinstance(dtype, str) else str(np.dtype(dtype) if isinstance(dtype, type) else dtype)
    name, sizes = name.removeprefix("torch."), tuple(int(size) for size in shape)
    return Description(name, sizes, DTYPES.get(name, 0) * int(np.prod(sizes, dtype=object)))


def when_computed(tensor: AnyTensor) -> Callable[[], None]:
    """What waits until all that is queued by now for a tensor's device has been done."""
    if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
        cuda: Any = torch.cuda  # untyped in part
        event = cuda.Event()
        event.record(cuda.current_stream(tensor.device))
        wait: Callable[[], None] = event.synchronize
        return wait
    return lambda: None


def copy_in(tensor: AnyTensor, store: Bytes, pages: Sequence[int], page_bytes: int) -> None:
    """Copies a tensor's elements, side by side, into these pages of the store. They are there when it returns."""
    nbytes = tensor.nbytes
    run = _run(store, pages, page_bytes, nbytes)
    whole: Any = _new(store, nbytes) if run is None else run
    _fill(whole, tensor)
    for page, start in zip(pages, range(0, nbytes, page_bytes), strict=True) if run is None else ():
        piece = whole[start : start + page_bytes]
        store[page * page_bytes : page * page_bytes + len(piece)] = piece
    when_computed(store)()


def read(store: Bytes, pages: Sequence[int], page_bytes: int, nbytes: int) -> tuple[Bytes, bool]:
    """The bytes of these pages, and whether they are a view of the store: where the pages do not lie side by side, they
    are a copy.
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
    """Memory for so many bytes, and whether it is these pages: where they do not lie side by side, it is other memory.
    What was there before is still in it.
    """
    run = _run(store, pages, page_bytes, nbytes)
    return (_new(store, nbytes), False) if run is None else (run, True)


def as_array(data: Bytes, what: Description) -> NDArray[Any]:
    """These bytes, without a copy. Raises TypeError for those on a device, and an element type that numpy lacks."""
    if isinstance(data, torch.Tensor):
        if data.is_cuda:
            raise TypeError("it lies on a device, where numpy reads nothing: use torch()")
        data = data.numpy()
    return data.view(np.dtype(what.dtype)).reshape(what.shape)


def as_tensor(data: Bytes, what: Description) -> torch.Tensor:
    """These bytes, without a copy."""
    whole = data if isinstance(data, torch.Tensor) else torch.from_numpy(data)
    return whole.view(getattr(torch, what.dtype)).view(what.shape)


def _new(store: Bytes, nbytes: int) -> Bytes:
    """Memory beside the store, of the same kind."""
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
