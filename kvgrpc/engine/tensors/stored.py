"""Tensors that lie in a store, as an engine has them in its hands."""

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from kvgrpc.core.tensors.values import Description, TensorId
from kvgrpc.engine.tensors.arrays import Bytes
from kvgrpc.errors import invalid


class StoredTensor:
    """A tensor that came, in the store: what `numpy` and `torch` give is good until `release`, as by `with`."""

    def __init__(
        self, id_: TensorId, what: Description, data: Bytes, is_view: bool, release: Callable[[TensorId], None]
    ) -> None:
        self.id, self.description, self.is_view = id_, what, is_view
        """`is_view`: the bytes are those in the store; where its pages did not lie side by side they are a copy."""
        self._data = data
        self._release: Callable[[TensorId], None] | None = release

    def numpy(self) -> NDArray[Any]:
        """As an array, read-only. Raises TypeError for an element type that numpy lacks: use `torch`."""
        array = self._data.view(np.dtype(self.description.dtype)).reshape(self.description.shape)
        array.flags.writeable = False
        return array

    def torch(self) -> torch.Tensor:
        """As a torch tensor on the CPU. Nothing writes into it."""
        return torch.from_numpy(self._data).view(getattr(torch, self.description.dtype)).view(self.description.shape)

    def release(self) -> None:
        """The memory is the store's again. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class NewTensor:
    """A tensor that an engine computes where it lies, in its own store, to put it without a copy. What `numpy` and
    `torch` give is the engine's until it puts it, or `release`, as by `with`; nothing may be written there after that.
    """

    def __init__(
        self, what: Description, allocation_id: str, pages: list[int], data: Bytes, is_view: bool,
        release: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`is_view`: as of StoredTensor; what is none is copied with the put."""
        self.description, self.allocation_id, self.pages, self.is_view = what, allocation_id, pages, is_view
        self._data = data
        self._release: Callable[[str], None] | None = release

    def numpy(self) -> NDArray[Any]:
        """As an array. Raises TypeError for an element type that numpy lacks: use `torch`."""
        return self._data.view(np.dtype(self.description.dtype)).reshape(self.description.shape)

    def torch(self) -> torch.Tensor:
        """As a torch tensor on the CPU."""
        return torch.from_numpy(self._data).view(getattr(torch, self.description.dtype)).view(self.description.shape)

    def take(self) -> Bytes:
        """Its bytes, to be put: from here on it is not the engine's. Raises InvalidRequest where that was so before."""
        if self._release is None:
            raise invalid("tensor", "was put already, or released")
        self._release = None
        return self._data

    def release(self) -> None:
        """It is not put: its memory is the store's again. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release(self.allocation_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
