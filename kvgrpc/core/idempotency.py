"""Idempotency keys: same caller, method, key and body, same answer.

A call still running is joined. Refusals are not kept: nothing changed, so asking again is safe and may now succeed.
A full table refuses new keys rather than forget old ones, because a forgotten key would let a retry act twice.
"""

from dataclasses import dataclass, field

from kvgrpc.core.actions import Answer
from kvgrpc.core.events import Call
from kvgrpc.errors import AlreadyExists, Exhausted, Reason

Scope = tuple[str, str, str]


@dataclass(eq=False)
class _Entry:
    body: bytes
    waiting: list[int] = field(default_factory=list)
    answer: Answer | None = None


class IdempotencyKeys:
    """The keys of one incarnation."""

    def __init__(self, capacity: int) -> None:
        self._entries: dict[Scope, _Entry] = {}
        self._running: dict[int, Scope] = {}
        self._capacity = capacity

    def begin(self, call: Call) -> Answer | bool | None:
        """True: a new call, go on. None: joined to a running one. Else the answer that was given before.

        Raises AlreadyExists (IDEMPOTENCY_KEY_REUSED) or Exhausted (LIMIT_EXCEEDED).
        """
        if not call.key:
            return True
        scope = (call.principal, call.method, call.key)
        entry = self._entries.get(scope)
        if entry is None:
            if len(self._entries) >= self._capacity:
                raise Exhausted(
                    Reason.LIMIT_EXCEEDED, f"{self._capacity} idempotency keys are in use", retry_delay_s=1.0
                )
            self._entries[scope] = _Entry(call.body, [call.id])
            self._running[call.id] = scope
            return True
        if entry.body != call.body:
            raise AlreadyExists(
                Reason.IDEMPOTENCY_KEY_REUSED, f"idempotency key {call.key!r} was used with another request"
            )
        if entry.answer is None:
            entry.waiting.append(call.id)
            return None
        return entry.answer

    def finish(self, call_id: int, answer: Answer | None) -> tuple[list[int], Scope | None]:
        """The calls that this answer (None: a refusal, the key is forgotten) goes to, and the scope if it is kept."""
        scope = self._running.pop(call_id, None)
        if scope is None:
            return [call_id], None
        entry = self._entries[scope]
        waiting, entry.waiting = entry.waiting, []
        if answer is None:
            del self._entries[scope]
            return waiting, None
        entry.answer = answer
        return waiting, scope

    def answer(self, scope: Scope) -> Answer | None:
        """What a key was answered."""
        entry = self._entries.get(scope)
        return entry.answer if entry else None

    def forget(self, scope: Scope) -> None:
        """Its time is over."""
        self._entries.pop(scope, None)

    def __len__(self) -> int:
        return len(self._entries)
