"""Checks how long transfers take in each phase: bounds far below those of whole transfers, one for each deadline.

The queue timeout covers handshake, access and queue together. If blocks are given later, the queue timeout starts anew
at that time, which must be before the cap of a lease. Next come the transfer timeout, for the bytes and their
checksums, and the settle timeout. A push waits for its other side for at most the registration timeout: at the
destination for a source that opens its access, at the source for a part. Renewals by key extend that wait.
"""

from math import isfinite

from kvgrpc.core.events import Event, KeysRenewed, PullBlocks
from kvgrpc.core.tables.transfers import Direction, Transfer
from kvgrpc.core.values.limits import Limits, bytes_timeout
from sim.rules import SLACK_S, Rule, broken


class WaitAudit:
    """The transfers of one lead in one life of its process. Times are on its clock."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._begun: set[str] = set()
        self._asked: dict[str, PullBlocks] = {}
        """Calls of unfinished pulls, by transfer."""
        self._due: dict[str, float] = {}
        """Time by which each pull must have left its phase."""
        self._last: dict[str, Transfer] = {}
        self._meets: dict[str, float] = {}
        """Time by which a push must have met its other side."""
        self._keys: dict[str, Transfer] = {}
        """Reservations among them, which wait here for a source."""

    def begun(self, transfer: Transfer, event: PullBlocks) -> None:
        """Takes note that a call has begun a pull. A repeated answer changes nothing."""
        if transfer.id in self._begun:
            return
        self._begun.add(transfer.id)
        self._asked[transfer.id] = event
        self._due[transfer.id] = transfer.created + (event.queue_timeout_s or self._limits.queue_timeout_s)
        self._last[transfer.id] = transfer

    def given(self, transfer_id: str, now: float) -> None:
        """Takes note that a pull gets blocks later than it was asked for."""
        event = self._asked.get(transfer_id)
        if event is not None:
            self._due[transfer_id] = now + (event.queue_timeout_s or self._limits.queue_timeout_s)

    def reserved(self, transfer: Transfer, timeout_s: float | None) -> None:
        """Takes note that blocks are reserved for a push. A repeated answer may only extend its wait."""
        if _apart(transfer):
            wait_s = self._limits.registration_timeout_s if timeout_s is None else timeout_s
            self._meets[transfer.id] = max(transfer.created + wait_s, self._meets.get(transfer.id, 0.0))
            self._keys[transfer.id] = transfer

    def hears(self, event: Event, now: float) -> None:
        """Takes note of how long a source keeps, or expects, what is waited for here."""
        if not isinstance(event, KeysRenewed):
            return
        for key, left_s in event.rows:
            for transfer in [found for found in self._keys.values() if found.key == key and isfinite(left_s)]:
                self.renewed(transfer.id, min(now + left_s, transfer.created + self._limits.lease_cap_s))

    def renewed(self, transfer_id: str, until: float) -> None:
        """Lets a push wait for its other side until then."""
        if transfer_id in self._meets:
            self._meets[transfer_id] = max(self._meets[transfer_id], until)

    def changed(self, new: Transfer, now: float) -> None:
        """Takes note of a changed transfer."""
        if not _apart(new):
            self._meets.pop(new.id, None)
            self._keys.pop(new.id, None)
        elif new.direction is Direction.SEND:
            self._meets.setdefault(new.id, now + self._limits.registration_timeout_s)
        event, old = self._asked.get(new.id), self._last.get(new.id)
        if event is None or old is None:
            return
        self._last[new.id] = new
        if new.ended is not None:
            self._left(old, new.ended)
            for table in (self._asked, self._due, self._last):
                del table[new.id]
        elif new.waiting_for == "blocks" != old.waiting_for:
            self._left(old, new.phases[-1].start)
            self._due[new.id] = new.created + self._limits.lease_cap_s
        elif len(new.phases) != len(old.phases):
            self._entered(old, new, event)

    def check(self, now: float) -> None:
        """Checks that no transfer is in a phase for too long."""
        for transfer_id, due in self._due.items():
            if now > due + SLACK_S:
                phase = self._last[transfer_id].phases[-1].name
                broken(Rule.R7, f"{transfer_id} is in phase {phase} {now - due:.3f} s too long", transfer_id)
        for transfer_id, due in self._meets.items():
            if now > due + SLACK_S:
                broken(Rule.R7, f"{transfer_id} waits {now - due:.3f} s too long for its other side", transfer_id)

    def life_began(self) -> None:
        """Forgets the last life, whose transfers are all over."""
        for table in (self._asked, self._due, self._last, self._meets, self._keys):
            table.clear()

    def _entered(self, old: Transfer, new: Transfer, event: PullBlocks) -> None:
        limits, phase = self._limits, new.phases[-1]
        self._left(old, phase.start)
        if phase.name == "wire":
            self._due[new.id] = phase.start + (event.transfer_timeout_s or bytes_timeout(new.nbytes, limits))
        elif phase.name == "settle":
            self._due[new.id] = phase.start + limits.settle_timeout_s

    def _left(self, old: Transfer, when: float) -> None:
        late_s = when - self._due[old.id]
        if late_s > SLACK_S:
            broken(Rule.R7, f"{old.id} was in phase {old.phases[-1].name} {late_s:.3f} s too long", old.id)


def _apart(transfer: Transfer) -> bool:
    """Returns True if a push waits for its other side: at its destination for the source, at its source for a part."""
    if transfer.over or not transfer.phases or transfer.phases[0].name != "rendezvous":
        return False
    return not transfer.lease_id if transfer.direction is Direction.SEND else len(transfer.phases) == 1
