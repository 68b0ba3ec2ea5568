"""Tensors in a store: those that an engine got, and those that it computes there."""

import threading
from collections.abc import Callable
from typing import Any, Self

import torch
from numpy.typing import NDArray

from kvgrpc.core.tensors.descriptions import Description, TensorId
from kvgrpc.engine.tensors.arrays import Bytes, as_array, as_tensor, when_computed
from kvgrpc.errors import invalid


class StoredTensor:
    """A tensor that an engine got. `numpy` and `torch` give memory that is valid until `release`, the end of `with`, or
    the end of its request.
    """

    def __init__(
        self, id_: TensorId, what: Description, data: Bytes, is_view: bool, release: Callable[[TensorId], None]
    ) -> None:
        self.id, self.description, self.is_view = id_, what, is_view
        """`is_view`: False if the bytes are a copy, because the tensor's pages did not lie side by side."""
        self._data = data
        self._release: Callable[[TensorId], None] | None = release

    def numpy(self) -> NDArray[Any]:
        """Returns a read-only array. Raises TypeError on a device, and for types that numpy lacks: use `torch`."""
        array = as_array(self._data, self.description)
        array.flags.writeable = False
        return array

    def torch(self) -> torch.Tensor:
        """Returns a torch tensor on the device of the store. It must not be written to."""
        return as_tensor(self._data, self.description)

    def release(self) -> None:
        """Gives the memory back, after waiting for this thread's current stream on the store's device. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            when_computed(self._data)()
            release(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class NewTensor:
    """A tensor that an engine computes in its own store, to put it without a copy. The engine owns it until it puts it,
    calls `release`, or leaves `with`. After that the results of `numpy` and `torch` must not be written or read, and
    both raise InvalidRequest.
    """

    def __init__(
        self, what: Description, allocation_id: str, pages: list[int], data: Bytes, is_view: bool,
        release: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`is_view`: as in StoredTensor; if False, the put copies the bytes. `release`: frees an allocation there."""
        self.description, self.allocation_id, self.pages, self.is_view = what, allocation_id, pages, is_view
        self._data: Bytes | None = data
        self._release = release
        self._lock = threading.Lock()

    def numpy(self) -> NDArray[Any]:
        """Returns an array. Raises TypeError for types that numpy lacks, and on a device: use `torch`."""
        return as_array(self._own(self._data), self.description)

    def torch(self) -> torch.Tensor:
        """Returns a torch tensor on the device of the store."""
        return as_tensor(self._own(self._data), self.description)

    def take(self, release: Callable[[str], None]) -> Bytes:
        """Takes the bytes from the engine, to put them. `release`: identifies the store that puts them. Raises
        InvalidRequest if they were put or released before, and for a tensor of another store.
        """
        if release != self._release:
            raise invalid("tensor", "is of another store: put it into that")
        return self._own(self._given_up())

    def release(self) -> None:
        """Gives the memory back to the store, instead of a put. Idempotent."""
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
