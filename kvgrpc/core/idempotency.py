"""Idempotency keys: same caller, method, key and body, same answer.

A call still running is joined. Refusals are not kept: nothing changed, so asking again is safe and may now succeed.
A full table refuses new keys rather than forget old ones, because a forgotten key would let a retry act twice.
"""

from dataclasses import dataclass, field
from enum import Enum

from kvgrpc.core.actions import Reply
from kvgrpc.core.events import Call
from kvgrpc.errors import AlreadyExists, Exhausted, Reason

Scope = tuple[str, str, str]


class Begun(Enum):
    """What to do with a call that was not answered before."""

    NEW = "new"
    """Go on."""
    JOINED = "joined"
    """The same call is running: its answer goes to this one too."""


@dataclass(eq=False)
class _Entry:
    scope: Scope
    body: bytes
    waiting: list[int] = field(default_factory=list)
    reply: Reply | None = None


class IdempotencyKeys:
    """The keys of one incarnation. A key that is kept has a name, for its deadline."""

    def __init__(self, capacity: int) -> None:
        self._entries: dict[Scope, _Entry] = {}
        self._running: dict[int, _Entry] = {}
        self._kept: dict[str, _Entry] = {}
        self._named = 0
        self._capacity = capacity

    def begin(self, call: Call) -> Reply | Begun:
        """What to do with a call, or the reply that was given before.

        Raises AlreadyExists (IDEMPOTENCY_KEY_REUSED) or Exhausted (LIMIT_EXCEEDED).
        """
        if not call.key:
            return Begun.NEW
        scope = (call.principal, call.method, call.key)
        entry = self._entries.get(scope)
        if entry is None:
            if len(self._entries) >= self._capacity:
                raise Exhausted(
                    Reason.LIMIT_EXCEEDED,
                    f"{self._capacity} idempotency keys are in use",
                    retry_delay_s=1.0,
                    metadata={"limit": str(self._capacity)},
                )
            self._entries[scope] = self._running[call.id] = _Entry(scope, call.body, [call.id])
            return Begun.NEW
        if entry.body != call.body:
            raise AlreadyExists(
                Reason.IDEMPOTENCY_KEY_REUSED, f"idempotency key {call.key!r} was used with another request"
            )
        if entry.reply is None:
            entry.waiting.append(call.id)
            return Begun.JOINED
        return entry.reply

    def finish(self, call_id: int, reply: Reply | None) -> tuple[list[int], str]:
        """The calls that this reply goes to, and the key's name if it is kept. None: a refusal, which is not."""
        entry = self._running.pop(call_id, None)
        if entry is None:
            return [call_id], ""
        waiting, entry.waiting = entry.waiting, []
        if reply is None:
            del self._entries[entry.scope]
            return waiting, ""
        entry.reply = reply
        self._named += 1
        name = str(self._named)
        self._kept[name] = entry
        return waiting, name

    def reply(self, name: str) -> Reply:
        """What a kept key was answered."""
        reply = self._kept[name].reply
        assert reply is not None, "a key is kept once it is answered"
        return reply

    def forget(self, name: str) -> None:
        """Its time is over."""
        del self._entries[self._kept.pop(name).scope]

    def __len__(self) -> int:
        return len(self._entries)
