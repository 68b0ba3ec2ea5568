"""Tensors that lie in a store, as an engine has them in its hands."""

import threading
from collections.abc import Callable
from typing import Any, Self

import torch
from numpy.typing import NDArray

from kvgrpc.core.tensors.values import Description, TensorId
from kvgrpc.engine.tensors.arrays import Bytes, as_array, as_tensor, when_computed
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
        """As an array, read-only. Raises TypeError on a device, and for types that numpy lacks: use `torch`."""
        array = as_array(self._data, self.description)
        array.flags.writeable = False
        return array

    def torch(self) -> torch.Tensor:
        """As a torch tensor, where the store is. Nothing writes into it."""
        return as_tensor(self._data, self.description)

    def release(self) -> None:
        """The memory is the store's again, once a device is past what this thread has queued on it. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            when_computed(self._data)()
            release(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class NewTensor:
    """A tensor that an engine computes where it lies, in its own store, to put it without a copy. It is the engine's
    until it puts it, or `release`, as by `with`; after that nothing may be written, or read, where `numpy` and `torch`
    said, and they raise InvalidRequest.
    """

    def __init__(
        self, what: Description, allocation_id: str, pages: list[int], data: Bytes, is_view: bool,
        release: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`is_view`: as of StoredTensor; what is none is copied with the put. `release`: of the store that it is in."""
        self.description, self.allocation_id, self.pages, self.is_view = what, allocation_id, pages, is_view
        self._data: Bytes | None = data
        self._release = release
        self._lock = threading.Lock()

    def numpy(self) -> NDArray[Any]:
        """As an array. Raises TypeError for types that numpy lacks, and on a device: use `torch`."""
        return as_array(self._own(self._data), self.description)

    def torch(self) -> torch.Tensor:
        """As a torch tensor, where the store is."""
        return as_tensor(self._own(self._data), self.description)

    def take(self, release: Callable[[str], None]) -> Bytes:
        """Its bytes, to be put into the store with that `release`: from here on it is not the engine's. Raises
        InvalidRequest where it was not any more, and for one of another store.
        """
        if release != self._release:
            raise invalid("tensor", "is of another store: put it into that")
        return self._own(self._given_up())

    def release(self) -> None:
        """It is not put: its memory is the store's again. Idempotent."""
        if self._given_up() is not None:
            self._release(self.allocation_id)

    def _given_up(self) -> Bytes | None:
        with self._lock:
            data, self._data = self._data, None
        return data

    @staticmethod
    def _own(data: Bytes | None) -> Bytes:
        if data is None:
            raise invalid("tensor", "was put already, or released")
        return data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
