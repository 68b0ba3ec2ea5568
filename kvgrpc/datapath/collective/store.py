"""A rendezvous, as torch.distributed calls it. Imports torch, so only the thread of a group imports it."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import distributed

from kvgrpc.datapath.collective.rendezvous import Rendezvous

_Store: Any = distributed.Store  # type: ignore[attr-defined]  # not in __all__


class RendezvousStore(_Store):  # type: ignore[misc]  # the base has no types
    """What a process group puts there goes to the other side, what it takes comes from there. Of several groups that
    use one rendezvous each has a prefix for its keys; `all_put`, which is called once, returns when all of them have
    put there what they have to say.
    """

    def __init__(self, rendezvous: Rendezvous, prefix: str = "", all_put: Callable[[], object] | None = None) -> None:
        super().__init__()
        self._rendezvous, self._prefix, self._all_put = rendezvous, prefix, all_put

    def set(self, key: str, value: bytes | str) -> None:
        self._rendezvous.put(self._prefix + key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        self._await_all_put()
        return self._rendezvous.take(self._prefix + key)

    def wait(self, keys: list[str], *_: timedelta) -> None:
        self._await_all_put()
        self._rendezvous.wait([self._prefix + key for key in keys])

    def check(self, keys: list[str]) -> bool:
        return self._rendezvous.has([self._prefix + key for key in keys])

    def _await_all_put(self) -> None:
        all_put, self._all_put = self._all_put, None
        if all_put is not None:
            all_put()
