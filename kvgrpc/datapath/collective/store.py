"""The stores by which a process group of torch.distributed looks for its other half. Imports torch, so only the thread
of a group imports it.
"""

from datetime import timedelta
from typing import Any

from torch import distributed

from kvgrpc.datapath.collective.rendezvous import Rendezvous

_Store: Any = distributed.Store  # type: ignore[attr-defined]  # not in __all__


class RendezvousStore(_Store):  # type: ignore[misc]  # the base has no types
    """What a process group puts there goes to the other side, what it takes comes from there."""

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
    """What a process group put there, and what its owner has it find. It waits for nothing: what is missing there is a
    KeyError.
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
