"""Deadlines: a dictionary of due times with a heap beside it.

Setting is O(log n) and clearing is O(1). Heap entries may lag behind the dictionary. A stale entry is dropped when it
reaches the top, so a renewal costs no search. The heap is rebuilt when most of it is stale.
"""

import heapq
import math
from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import count


class Timer(Enum):
    """The purpose of a deadline."""

    # Members are singletons, so identity is enough. Enum's own hash is Python code on the hottest path.
    __hash__ = object.__hash__

    LEASE = "lease"
    SOFTEN = "soften"
    BLOCKS = "blocks"
    QUEUE = "queue"
    TRANSFER = "transfer"
    SETTLE = "settle"
    SETTLE_RETRY = "settle_retry"
    OPEN_RETRY = "open_retry"
    CLOSE_RETRY = "close_retry"
    DEAD_PEER_RETRY = "dead_peer_retry"
    RENEW = "renew"
    REGISTRATION = "registration"
    RENDEZVOUS = "rendezvous"
    PARTS_RETRY = "parts_retry"
    OPEN_WAIT = "open_wait"
    ACCESS_FORGET = "access_forget"
    CLOSED_IDS = "closed_ids"
    PEER_GRACE = "peer_grace"
    CONNECT = "connect"
    DIAL_AGAIN = "dial_again"
    ADMIT = "admit"
    IDEMPOTENCY = "idempotency"
    TOMBSTONE = "tombstone"
    ALLOCATION = "allocation"
    QUARANTINE = "quarantine"
    REKEY = "rekey"
    CHECKSUMS = "checksums"
    CHECKSUMS_ASK = "checksums_ask"
    SEND = "send"
    TENSOR_WAIT = "tensor_wait"
    TENSOR_TTL = "tensor_ttl"
    TENSOR_FORGET = "tensor_forget"


Key = tuple[Timer, str]
FORGETS = frozenset({Timer.ACCESS_FORGET, Timer.IDEMPOTENCY, Timer.TOMBSTONE, Timer.TENSOR_FORGET})
"""Timers that nobody waits for. Every call may leave one."""
FORGET_TOGETHER_S = 0.1
"""Interval in seconds to which `FORGETS` deadlines are rounded up, so that a server wakes up once for many of them."""

STALE_MIN = 1_024
"""Number of stale entries that are not worth a rebuild."""


class Timers:
    """Deadlines, at most one for each (timer, name)."""

    def __init__(self) -> None:
        self._when: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._order = count()
        self.earliest = math.inf
        """No deadline is before this time, which may be that of a cleared one. Read-only outside."""

    def set(self, timer: Timer, name: str, when: float) -> None:
        """Sets or moves a deadline."""
        if timer in FORGETS:
            when = math.ceil(when / FORGET_TOGETHER_S) * FORGET_TOGETHER_S
        key = (timer, name)
        self._when[key] = when
        self.earliest = min(self.earliest, when)
        heapq.heappush(self._heap, (when, next(self._order), key))
        if len(self._heap) > 2 * len(self._when) + STALE_MIN:
            # Keyed, because a deadline set twice to the same moment has two entries that are not stale.
            kept = {entry[2]: entry for entry in self._heap if self._when.get(entry[2]) == entry[0]}
            self._heap = list(kept.values())
            heapq.heapify(self._heap)

    def clear(self, timer: Timer, name: str) -> None:
        """Removes a deadline, if there is one."""
        self._when.pop((timer, name), None)

    def clear_some(self, timers: Iterable[Timer], name: str) -> None:
        """Removes these deadlines of one name, as far as they are set."""
        for timer in timers:
            self._when.pop((timer, name), None)

    def clear_all(self) -> None:
        """Removes every deadline."""
        self._when.clear()
        self._heap.clear()
        self.earliest = math.inf

    def when(self, timer: Timer, name: str) -> float | None:
        """Returns a deadline, or None when it is not set."""
        return self._when.get((timer, name))

    def next_deadline(self) -> float | None:
        while self._heap:
            when, _, key = self._heap[0]
            if self._when.get(key) == when:
                self.earliest = when
                return when
            heapq.heappop(self._heap)
        self.earliest = math.inf
        return None

    def due(self, now: float) -> Iterator[Key]:
        """Takes out and yields what is due at `now`, in order, including what becomes due meanwhile."""
        while (when := self.next_deadline()) is not None and when <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._when[key]
            yield key

    def __len__(self) -> int:
        return len(self._when)
