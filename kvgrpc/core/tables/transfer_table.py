"""The table of transfers: the live ones, a bounded history, and the log of their changes.

Ended transfers stay live until their engine has acknowledged them. The history is no `remembered.Remembered`: it
forgets successes before failures, and is bounded by number and bytes over both.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Unpack

from kvgrpc.core.tables.ledger import Ledger, RowKind
from kvgrpc.core.tables.transfers import (
    DISPOSITIONS,
    ENDED,
    STATES,
    Changes,
    Disposition,
    Failure,
    NewTransfer,
    State,
    Transfer,
    pair_id,
)
from kvgrpc.core.values.ids import may_name, mint_id
from kvgrpc.core.values.owners import Ground, Thing, ThingKind, Verb, may, tenant_of
from kvgrpc.errors import NextStep, NotFound, Reason, full


@dataclass
class TransferTable:
    """All transfers of one incarnation, and the log of their changes. `history` is at least 1."""

    incarnation: int
    history: int
    ledger: Ledger = field(default_factory=Ledger)
    secret: bytes = b""
    """The life's secret, from which the ids of its transfers derive."""
    seq: int = 0
    current: dict[str, Transfer] = field(default_factory=dict)
    """Transfers that are not in the history. Read-only outside."""
    _numbers: int = 0
    _past: OrderedDict[str, Transfer] = field(default_factory=OrderedDict)
    """Succeeded or cancelled transfers in the history, oldest first."""
    _failed: OrderedDict[str, Transfer] = field(default_factory=OrderedDict)
    """Failed transfers in the history, oldest first. Kept longest, because routers and operators ask about them."""
    _order: dict[str, None] = field(default_factory=dict)
    """Ids of all transfers, in order of creation."""
    _by_key: dict[bytes, dict[str, None]] = field(default_factory=dict)
    _past_by_key: dict[bytes, dict[str, None]] = field(default_factory=dict)
    """Transfers in the history, by key."""
    _left: dict[str, None] = field(default_factory=dict)
    """Transfers taken over from an earlier life, whose blocks are in that life's memory and were not returned."""
    _log: deque[Transfer] = field(init=False)
    counts: dict[State, int] = field(default_factory=lambda: dict.fromkeys(State, 0))
    queued_bytes: int = 0
    """Number of bytes that transfers with an open access still have to move."""

    def __post_init__(self) -> None:
        self._log = deque(maxlen=self.history)

    def enter(self, ledger: Ledger) -> None:
        """Enters the transfers of an earlier life into a new ledger."""
        self.ledger = ledger
        for transfer in self.current.values():
            ledger.keep(RowKind.TRANSFER, transfer.id, transfer.owner, transfer.kept_bytes)
        for transfer in (*self._past.values(), *self._failed.values()):
            ledger.remember(RowKind.PAST_TRANSFER, transfer.kept_bytes)

    def create(self, now: float, payer: str = "", **fields: Unpack[NewTransfer]) -> Transfer:
        """Creates a PENDING transfer. Its owner pays for it unless `payer` is named."""
        self._numbers += 1
        self.seq += 1
        fields["tenant"] = fields.get("tenant") or tenant_of(fields["owner"])
        id_ = mint_id(self.secret, self.incarnation, "transfer", "lead", self._numbers)
        transfer = Transfer(id=id_, created=now, seq=self.seq, pair_id=pair_id(fields["key"]), **fields)
        self._by_key.setdefault(transfer.key, {})[id_] = None
        self.counts[transfer.state] += 1
        self.ledger.keep(RowKind.TRANSFER, id_, payer or transfer.owner, transfer.kept_bytes)
        self.current[id_] = transfer
        self._order[id_] = None
        self._log.append(transfer)
        return transfer

    def change(self, transfer_id: str, **changes: Unpack[Changes]) -> Transfer:
        """Returns the changed transfer. Asserts that the tables allow the change: callers decide, tables guard."""
        old = self.current[transfer_id]
        state, memory = changes.get("state", old.state), changes.get("memory", old.memory)
        assert state is old.state or state in STATES[old.state], f"{old.state} to {state}"
        assert memory is old.memory or memory in DISPOSITIONS[old.memory], f"{old.memory} to {memory}"
        self.counts[old.state] -= 1
        self.counts[state] += 1
        self.seq += 1
        # This is `dataclasses.replace` in a tenth of the time: a pull changes its transfer six times.
        new = object.__new__(Transfer)
        made = new.__dict__
        made.update(old.__dict__, **changes)
        made["seq"], over = self.seq, state in ENDED
        made["over"], made["settled"] = over, over and memory is Disposition.RETURNED
        if over and not old.over:
            made["end_seq"] = self.seq
        left, phases = new.nbytes - new.nbytes_done, new.phases
        waits = state is State.PENDING and phases and phases[-1].name == "queue"
        queued = left if left > 0 and (waits or state is State.ACTIVE) else 0
        self.queued_bytes += queued - old.queued_bytes
        made["queued_bytes"] = queued
        self.current[transfer_id] = new
        self._log.append(new)
        return new

    def check_room(self, payer: str) -> None:
        """Raises Exhausted: QUEUE_FULL when there are as many transfers as allowed, and LIMIT_EXCEEDED when as many are
        the payer's tenant's as one may have.
        """
        most = self.ledger.limits.transfers
        if len(self.current) >= most:
            raise full(f"{most} transfers wait or run", most, reason=Reason.QUEUE_FULL)
        self.ledger.check_rows(RowKind.TRANSFER, payer, most)

    def get(self, transfer_id: str) -> Transfer:
        """Returns the transfer, also from the history. Raises NotFound (TRANSFER_NOT_FOUND)."""
        found = self.find(transfer_id)
        if found is None:
            raise _unknown(transfer_id)
        return found

    def find(self, transfer_id: str) -> Transfer | None:
        """Returns the transfer, also from the history, or None."""
        return self.current.get(transfer_id) or self._past.get(transfer_id) or self._failed.get(transfer_id)

    def may(self, caller: str, verb: Verb, transfer_id: str, shown: Ground | None = None) -> bool:
        """Returns whether a principal may do that with a transfer. False when the transfer does not exist."""
        found = self.find(transfer_id)
        return found is not None and may(caller, verb, Thing(ThingKind.TRANSFER, found.owner, found.tenant), shown)

    def get_for(self, caller: str, verb: Verb, transfer_id: str, shown: Ground | None = None) -> Transfer:
        """Returns the transfer. Raises NotFound (TRANSFER_NOT_FOUND), also when the caller may not do that with it."""
        found = self.find(transfer_id)
        if found is None or not may(caller, verb, Thing(ThingKind.TRANSFER, found.owner, found.tenant), shown):
            raise _unknown(transfer_id)
        return found

    def with_key(self, key: bytes) -> list[Transfer]:
        """Returns transfers with that key that are not in the history yet, oldest first."""
        ids = self._by_key.get(key)
        return [self.current[id_] for id_ in ids] if ids else []

    def past_with_key(self, key: bytes) -> list[Transfer]:
        """Returns transfers with that key that are in the history, oldest first."""
        found = (self.find(id_) for id_ in self._past_by_key.get(key, ()))
        return [transfer for transfer in found if transfer is not None]

    def acknowledge(self, ids: Sequence[str], caller: str, *, asking: bool) -> int:
        """Moves settled transfers of the caller to the history and returns their number. `asking` only counts them."""
        take = self.archivable if asking else self.archive
        return sum(take(id_) for id_ in ids if self.may(caller, Verb.ACKNOWLEDGE, id_))

    def archivable(self, transfer_id: str) -> bool:
        """Returns whether it is a settled transfer, in the history or on its way there."""
        transfer = self.find(transfer_id)
        return transfer is not None and transfer.settled

    def archive(self, transfer_id: str) -> bool:
        """Moves a settled transfer to the bounded history. Returns False when the transfer is not settled."""
        if transfer_id in self._past or transfer_id in self._failed:
            return True
        transfer = self.current.get(transfer_id)
        if transfer is None or not transfer.settled:
            return False
        del self.current[transfer_id]
        ids = self._by_key[transfer.key]
        del ids[transfer_id]
        if not ids:
            del self._by_key[transfer.key]
        self._past_by_key.setdefault(transfer.key, {})[transfer_id] = None
        past = self._failed if transfer.state is State.FAILED else self._past
        past[transfer_id] = transfer
        self.ledger.drop(RowKind.TRANSFER, transfer_id)
        self.ledger.remember(RowKind.PAST_TRANSFER, transfer.kept_bytes)
        kept, nbytes = len(self._past) + len(self._failed), self.ledger.by_kind[RowKind.PAST_TRANSFER]
        if kept > self.history or (kept > 1 and nbytes > self.ledger.limits.remembered_bytes):
            # The newest stays in any case, because the event that ended it is about to read it.
            oldest = next(iter(self._past), transfer_id)
            _, gone = (self._past if oldest != transfer_id else self._failed).popitem(last=False)
            self.ledger.remember(RowKind.PAST_TRANSFER, -gone.kept_bytes)
            del self._order[gone.id]
            ids = self._past_by_key[gone.key]
            del ids[gone.id]
            if not ids:
                del self._past_by_key[gone.key]
        return True

    def take_over(self, old: "TransferTable", failure: Failure, now: float) -> list[Transfer]:
        """Takes over the transfers of a life that a defect ended, and returns the changes. Unfinished ones have failed,
        and held memory is in quarantine. Only rows are read, because the indexes may be half changed.
        """
        self.seq = old.seq
        self.counts |= {end: old.counts.get(end, 0) for end in ENDED}
        changed = []
        for transfer in sorted(old.rows(), key=lambda t: t.created):
            self.current[transfer.id] = transfer
            self._order[transfer.id] = None
            self.ledger.keep(RowKind.TRANSFER, transfer.id, transfer.owner, transfer.kept_bytes)
            self._by_key.setdefault(transfer.key, {})[transfer.id] = None
            ends: Changes = {}
            if not transfer.over:
                self.counts[transfer.state] += 1
                self.queued_bytes += transfer.queued_bytes
                phase = transfer.phases[-1].name if transfer.phases else ""
                ends = {"state": State.FAILED, "failure": replace(failure, phase=phase), "ended": now}
                ends |= {"phases": transfer.phases_at(now), "waiting_for": ""}
            if transfer.memory is Disposition.HELD:
                ends["memory"] = Disposition.QUARANTINED
            if ends:
                changed.append(self.change(transfer.id, **ends))
            if transfer.memory is not Disposition.RETURNED:
                self._left[transfer.id] = None
            self.archive(transfer.id)
        return changed

    def memory_gone(self) -> list[Transfer]:
        """Marks the memory of earlier lives as gone. Returns the transfers that this settles."""
        left, self._left = self._left, {}
        changed = [self.change(id_, memory=Disposition.RETURNED) for id_ in left]
        for id_ in left:
            self.archive(id_)
        return changed

    @property
    def quarantined(self) -> bool:
        """True when the memory of a transfer of this life is in quarantine."""
        return any(t.memory is Disposition.QUARANTINED and t.id not in self._left for t in self.rows())

    def changes_after(self, seq: int) -> list[Transfer] | None:
        """Returns changes after `seq`, oldest first, or None when some are no longer known."""
        if seq >= self.seq:
            return []
        if not self._log or self._log[0].seq > seq + 1:
            return None
        return [change for change in self._log if change.seq > seq]

    @property
    def kept_bytes(self) -> dict[Hashable, int]:
        """Estimated bytes of each live transfer, by id."""
        return {transfer.id: transfer.kept_bytes for transfer in self.current.values()}

    @property
    def past_bytes(self) -> int:
        """Estimated bytes of all transfers in the history."""
        return sum(past.kept_bytes for past in (*self._past.values(), *self._failed.values()))

    @property
    def live(self) -> int:
        """Number of transfers that are not in the history."""
        return len(self.current)

    def rows(self) -> list[Transfer]:
        """Returns live transfers and history, read from no index."""
        return [*self.current.values(), *self._past.values(), *self._failed.values()]

    def __iter__(self) -> Iterator[Transfer]:
        """Iterates over live transfers and history, newest first. A row is looked up only when it is asked for."""
        return (transfer for id_ in reversed(self._order) if (transfer := self.find(id_)) is not None)

    def unfinished(self) -> list[Transfer]:
        """Returns the transfers that are not over, oldest first."""
        return [t for t in self.current.values() if not t.over]

    @property
    def going_on(self) -> int:
        """Number of transfers that are not over."""
        return self.counts[State.PENDING] + self.counts[State.ACTIVE]


def _unknown(transfer_id: str) -> NotFound:
    if may_name("transfer", transfer_id):
        why = f"no transfer {transfer_id} here any more: treat its memory as quarantined"
        return NotFound(Reason.TRANSFER_NOT_FOUND, why)
    error = NotFound(
        Reason.TRANSFER_NOT_FOUND, f"{transfer_id!r} is the id of no transfer: take it from a reply, unchanged"
    )
    error.next = NextStep.FIX_REQUEST
    return error
