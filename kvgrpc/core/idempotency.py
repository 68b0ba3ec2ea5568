"""Idempotency keys: same caller, method, key and body, same answer.

A retry of a call that still runs joins it. Refusals are not kept: they changed nothing, so a retry is safe and may
succeed. The keys are no `remembered.Remembered`: a full table refuses new keys rather than forget old ones, because a
forgotten key would let a retry act twice, and a key outlasts its time while what it created lives.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum

from kvgrpc.core.actions import (
    Allocated,
    Answer,
    BlocksReserved,
    Freed,
    GaveUp,
    HandedOver,
    PullStarted,
    Reclaimed,
    Registered,
    Released,
    Renewed,
    Reply,
)
from kvgrpc.core.events import Call
from kvgrpc.core.tables.allocator import Allocator
from kvgrpc.core.tables.leases import LeaseTable
from kvgrpc.core.tables.ledger import Ledger, RowKind, texts_bytes
from kvgrpc.core.tables.transfer_table import TransferTable
from kvgrpc.core.values.block_ids import kept, kept_bytes
from kvgrpc.errors import AlreadyExists, Reason, full

Scope = tuple[str, str, str]
KEY_BYTES = 1_100
"""Kept bytes of a key without its texts and its reply, but with its deadline and its row in the ledger."""
REPLY_BYTES = 1_400
"""Kept bytes of a reply with a transfer, without its variable parts."""


class Begun(Enum):
    """The course of a call that was not answered before."""

    NEW = "new"
    """The call goes on."""
    JOINED = "joined"
    """The same call is running: its answer goes to this call too."""


@dataclass(eq=False)
class _Entry:
    scope: Scope
    body: bytes
    waiting: list[int] = field(default_factory=list)
    reply: Reply | None = None

    @property
    def kept_bytes(self) -> int:
        return KEY_BYTES + texts_bytes(*self.scope) + (0 if self.reply is None else _answer_bytes(self.reply.answer))


class IdempotencyKeys:
    """The keys of one incarnation. A kept key has a name, for its deadline."""

    def __init__(self, capacity: int, ledger: Ledger | None = None) -> None:
        self._ledger = ledger or Ledger()
        self._entries: dict[Scope, _Entry] = {}
        self.running: dict[int, _Entry] = {}
        """Calls that are not answered, by number. Read-only outside."""
        self._kept: dict[str, _Entry] = {}
        self._named = 0
        self._capacity = capacity

    def begin(self, call: Call) -> Reply | Begun:
        """Begins a call with a key. Returns whether it is new or joined, or the reply that was given before.

        Raises AlreadyExists (IDEMPOTENCY_KEY_REUSED) or Exhausted (LIMIT_EXCEEDED).
        """
        scope = (call.principal, call.method, call.key)
        entry = self._entries.get(scope)
        if entry is None:
            if len(self._entries) >= self._capacity:
                raise full(f"{self._capacity} idempotency keys are in use", self._capacity)
            nbytes = KEY_BYTES + texts_bytes(*scope)
            self._ledger.enter(RowKind.KEY, scope, call.payer, nbytes)
            self._entries[scope] = self.running[call.id] = _Entry(scope, call.body, [call.id])
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
        """Returns the calls that get this reply, and the name of the kept key. None: a refusal, which is not kept."""
        entry = self.running.pop(call_id, None)
        if entry is None:
            return [call_id], ""
        waiting, entry.waiting = entry.waiting, []
        if reply is None:
            self._drop(entry.scope)
            return waiting, ""
        entry.reply = reply
        self._ledger.weigh(RowKind.KEY, entry.scope, entry.kept_bytes)
        self._named += 1
        name = str(self._named)
        self._kept[name] = entry
        return waiting, name

    def reply(self, name: str) -> Reply:
        reply = self._kept[name].reply
        assert reply is not None, "a key is kept once it is answered"
        return reply

    def forget(self, name: str) -> None:
        """Forgets a kept key whose time is over."""
        self._drop(self._kept.pop(name).scope)

    @property
    def kept_bytes(self) -> dict[Hashable, int]:
        """Kept bytes of each key."""
        return {scope: entry.kept_bytes for scope, entry in self._entries.items()}

    def _drop(self, scope: Scope) -> None:
        del self._entries[scope]
        self._ledger.drop(RowKind.KEY, scope)

    def __len__(self) -> int:
        return len(self._entries)


def lives(answer: Answer, leases: LeaseTable, transfers: TransferTable, allocator: Allocator) -> bool:
    """Returns whether what an answer gave still lives."""
    if isinstance(answer, Allocated):
        return allocator.known(answer.allocation_id)
    if isinstance(answer, HandedOver):
        lease = leases.find(answer.lease.id)
        if lease is not None and lease.live:
            return True
    if (
        isinstance(answer, HandedOver | PullStarted | Registered | BlocksReserved | GaveUp)
        and answer.transfer is not None
    ):
        transfer = transfers.find(answer.transfer.id)
        return transfer is not None and not transfer.settled
    return False


def _answer_bytes(answer: Answer) -> int:
    """Returns the kept bytes of a reply with its contents."""
    match answer:
        case HandedOver(lease=lease) | Released(lease=lease):
            labels = texts_bytes(*[side for pair in lease.labels for side in pair])
            more = kept_bytes(kept(answer, "freed")) if isinstance(answer, Released) else len(answer.token)
            return 2 * REPLY_BYTES + labels + more + kept_bytes(kept(lease))
        case Allocated():
            return REPLY_BYTES + kept_bytes(kept(answer))
        case Freed():
            return REPLY_BYTES + kept_bytes(kept(answer, "freed"))
        case Reclaimed():
            rows = REPLY_BYTES * (1 + len(answer.later)) + 500 * len(answer.leases)
            return rows + kept_bytes(kept(answer, "freed"))
        case Renewed():
            return REPLY_BYTES + 120 * len(answer.rows)
    return REPLY_BYTES
