"""The tensors and offers that are here, by request."""

from collections.abc import Set

from kvgrpc.core.tensors.descriptions import TensorId

RENEW_S = 1.0
"""Minimum time between two renewals of a request, in seconds."""


class TensorsByRequest:
    """Tensors and offers here, by transfer key."""

    def __init__(self) -> None:
        self._of: dict[bytes, dict[TensorId, None]] = {}
        self._renewed: dict[bytes, float] = {}
        """Time of each request's last renewal."""

    def __contains__(self, key: object) -> bool:
        return key in self._of

    def add(self, id_: TensorId) -> None:
        """Adds a tensor or an offer."""
        self._of.setdefault(id_.key, {})[id_] = None

    def drop(self, id_: TensorId) -> None:
        """Removes a tensor or an offer."""
        of = self._of[id_.key]
        del of[id_]
        if not of:
            del self._of[id_.key]
            self._renewed.pop(id_.key, None)

    def of(self, key: bytes) -> Set[TensorId]:
        """Returns the ids here of a request, in the order of their arrival."""
        return self._of.get(key, {}).keys()

    def renewed(self, key: bytes, now: float) -> Set[TensorId]:
        """Returns the ids here of a request that somebody waits for, and counts them as renewed. Empty when it is too
        soon for another renewal.
        """
        before = self._renewed.get(key)
        if key not in self._of or (before is not None and now < before + RENEW_S):
            return frozenset()
        self._renewed[key] = now
        return self._of[key].keys()
