"""Stores by which a process group of torch.distributed finds its other half. The module imports torch, so only the
thread of a group imports it.
"""

from datetime import timedelta
from typing import Any

from torch import distributed

from kvgrpc.datapath.collective.rendezvous import Rendezvous

_Store: Any = distributed.Store  # type: ignore[attr-defined]  # not in __all__


class RendezvousStore(_Store):  # type: ignore[misc]  # the base has no types
    """A store whose writes go to the other side, and whose reads come from there."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__()
        self._rendezvous = rendezvous

    def set(self, key: str, value: bytes | str) -> None:
        self._rendezvous.put(key, _bytes(value))

    def get(self, key: str) -> bytes:
        return self._rendezvous.take(key)

    def wait(self, keys: list[str], *_: timedelta) -> None:
        self._rendezvous.wait(keys)

    def check(self, keys: list[str]) -> bool:
        return self._rendezvous.has(keys)


class OwnStore(_Store):  # type: ignore[misc]  # likewise
    """A store of a group's own writes and of the values that its owner sets. The store does not wait: a missing key
    raises KeyError.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        self.values[key] = _bytes(value)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def wait(self, keys: list[str], *_: timedelta) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
