"""A rendezvous, as torch.distributed calls it. Imports torch, so only the thread of a group imports it."""

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
        self._rendezvous.put(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._rendezvous.take(key)

    def wait(self, keys: list[str], *_: timedelta) -> None:
        self._rendezvous.wait(keys)

    def check(self, keys: list[str]) -> bool:
        return self._rendezvous.has(keys)
