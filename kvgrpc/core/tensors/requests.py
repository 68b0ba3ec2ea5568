"""Which tensors and offers of each request are here."""

from collections.abc import Set

from kvgrpc.core.tensors.values import TensorId

RENEW_S = 1.0
"""Between two renewals of a request."""


class Requests:
    """By transfer key, of those of which something is here."""

    def __init__(self) -> None:
        self._of: dict[bytes, dict[TensorId, None]] = {}
        self._renewed: dict[bytes, float] = {}
        """When each was renewed last."""

    def __contains__(self, key: object) -> bool:
        return key in self._of

    def add(self, id_: TensorId) -> None:
        """It is here."""
        self._of.setdefault(id_.key, {})[id_] = None

    def drop(self, id_: TensorId) -> None:
        """It is not here any more."""
        of = self._of[id_.key]
        del of[id_]
        if not of:
            del self._of[id_.key]
            self._renewed.pop(id_.key, None)

    def of(self, key: bytes) -> Set[TensorId]:
        """What is here of a request, in the order in which it came."""
        return self._of.get(key, {}).keys()

    def renewed(self, key: bytes, now: float) -> Set[TensorId]:
        """What is here of a request that somebody waits for, if its time is to begin anew now: not again too soon."""
        before = self._renewed.get(key)
        if key not in self._of or (before is not None and now < before + RENEW_S):
            return frozenset()
        self._renewed[key] = now
        return self._of[key].keys()
