"""Rendezvous of two ranks: exchanges the values by which the halves of a process group find each other, over gRPC.

A process group asks a store for the other side's values. Here each side has one value, which travels in PostSend and
its answer. So only the group's own port is opened, and only the two leads can write the values.
"""

import threading
import time
from collections.abc import Callable, Sequence

from kvgrpc.core.values.sends import Values
from kvgrpc.datapath.base import DataPathFailed


class Rendezvous:
    """One side of the exchange. `told` is called once, from the thread that makes the group, with all values for the
    other side; `learn` may come before or after it. From the first wait on, missing values are awaited for `wait_s`.
    """

    def __init__(self, told: Callable[[Values], None], wait_s: float) -> None:
        self._told: Callable[[Values], None] | None = told
        self._wait_s = wait_s
        self._give_up_at: float | None = None
        self._own: dict[str, bytes] = {}
        self._peers: Values | None = None
        self._over = ""
        self._changed = threading.Condition()

    def learn(self, values: Values) -> None:
        """Takes the values of the other side."""
        with self._changed:
            self._peers = values
            self._changed.notify_all()

    def give_up(self, why: str) -> None:
        """Makes all waits fail."""
        with self._changed:
            self._over = self._over or why
            self._changed.notify_all()

    @property
    def waits(self) -> bool:
        """True if the other side's values are missing, and it was told what it needs to send them."""
        with self._changed:
            return self._told is None and self._peers is None

    def exchange(self, own: Values) -> Values:
        """Tells the other side `own`, and returns the other side's values. Raises DataPathFailed if the other side
        does not come.
        """
        for key, value in own:
            self.put(key, value)
        self.tell()
        with self._changed:
            self._await(lambda: self._peers is not None)
            return self._peers or ()

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._own[key] = value

    def has(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return self._has(keys)

    def take(self, key: str) -> bytes:
        """Returns the value of a key. Raises DataPathFailed if the other side does not come."""
        self.wait([key])
        with self._changed:
            return self._own[key] if key in self._own else dict(self._peers or ())[key]

    def wait(self, keys: Sequence[str]) -> None:
        """Waits for keys. Raises DataPathFailed if the other side does not come."""
        if all(key in self._own for key in keys):
            return
        self.tell()
        with self._changed:
            self._await(lambda: self._has(keys))

    def tell(self) -> None:
        """Tells the other side this side's values; only the first call does."""
        told, self._told = self._told, None
        if told is not None:
            told(tuple(self._own.items()))

    def _has(self, keys: Sequence[str]) -> bool:
        peers = dict(self._peers or ())
        return all(key in self._own or key in peers for key in keys)

    def _await(self, there: Callable[[], bool]) -> None:
        self._give_up_at = self._give_up_at or time.monotonic() + self._wait_s
        while not there():
            left = self._give_up_at - time.monotonic()
            if self._over or left <= 0:
                raise DataPathFailed(self._over or "the other rank did not come")
            self._changed.wait(left)
