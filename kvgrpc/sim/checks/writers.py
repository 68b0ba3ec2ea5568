"""Who may write into the blocks of a lead's engine, and of whom the lead was told that they write no more."""

from collections.abc import Callable, Iterable

from kvgrpc.core.actions import Expect
from kvgrpc.core.events import Event, ProcessEnded, Rekeyed, ReleaseQuarantine
from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.transfers import Direction, Disposition, Transfer
from kvgrpc.sim.checks.rest import Rest, Word
from kvgrpc.sim.rules import Rule, broken

CanTell = Callable[[str, str], bool]
"""Whether the life of a source lives, knows this lead, and saw that nothing of its own fills a transfer any more."""


class WriterAudit:
    """The writers of one lead, in one life of its engine."""

    def __init__(self) -> None:
        self._writers: dict[str, dict[str, str]] = {}
        """By transfer: accesses under which a source may write, as ranks call them, and the source's life."""
        self._ended: dict[str, dict[tuple[int, int], bool]] = {}
        """By life, the ranks that saw a process end, and whose, and whether nothing of it lands any more."""
        self._proved: set[str] = set()
        """Accesses under which nothing is written any more: that was seen."""
        self._gone: set[str] = set()
        """Lives of which it was."""
        self._rest = Rest()
        self._heard: Event | None = None

    def hears(self, event: Event, state: NodeState) -> None:
        """Before the lead handles an event."""
        self._heard = event
        if isinstance(event, Word):
            self._rest.hears(event, state.accesses)
        elif isinstance(event, ProcessEnded) and event.peer in state.peers:
            self.process_ended(event, len(state.peers[event.peer].bridges.pairs))

    def expects(self, action: Expect) -> None:
        """The lead expects writes under an access from now on, or no longer: then it has reason to."""
        if action.open:
            self._rest.expects(action.access)
        else:
            of_all = isinstance(self._heard, Rekeyed | ReleaseQuarantine)
            self._rest.believed(action.access, proved=lambda life: of_all or life in self._gone)

    def changed(self, transfer: Transfer) -> None:
        """A transfer changed. When its blocks come back they are not written."""
        if transfer.direction is Direction.RECEIVE and transfer.memory is Disposition.RETURNED:
            self._rest.returned(transfer.id)

    def granted(self, access_id: bytes, transfer_id: str, life: str) -> None:
        """A source may write under an access from now on."""
        self._writers.setdefault(transfer_id, {})[f"w-{access_id.hex()}"] = life
        self._rest.granted(access_id, transfer_id)

    def process_ended(self, event: ProcessEnded, pairs: int) -> None:
        """The lead is told that a process of a peer is gone, of those in so many pairs of ranks."""
        ended = self._ended.setdefault(event.peer, {})
        ended[event.rank, event.peer_rank] = event.drained
        if len(ended) == pairs and all(ended.values()):
            self._gone.add(event.peer)
            for writers in self._writers.values():
                self._proved.update(name for name, life in writers.items() if life == event.peer)

    def check_heeded(self, open_writes: frozenset[str]) -> None:
        """The lead expects no writes of which it knows that they cannot come."""
        if not self._proved.isdisjoint(open_writes):
            name = min(self._proved & open_writes)
            broken(Rule.END, f"writes under {name} are expected, and their writers are known to be gone", name)

    def check(self, transfers: Iterable[Transfer], open_writes: frozenset[str]) -> None:
        """Once no posting is in flight here, only blocks are in quarantine that may still be written, for all the
        lead knows. `open_writes`: accesses under which it still expects writes.
        """
        for transfer in transfers:
            if transfer.memory is not Disposition.QUARANTINED:
                continue
            writers = self._writers.get(transfer.id, {}).keys() & open_writes
            if transfer.direction is Direction.SEND or not writers:
                broken(Rule.END, f"{transfer.id} is in quarantine, and all its postings have ended", transfer.id)
        self.check_heeded(open_writes)

    def check_told(self, open_writes: frozenset[str], can_tell: CanTell, missed: Callable[[str], bool]) -> None:
        """Once all leads have been reached again: no source keeps it to itself that it writes no more, and the end of
        none was `missed` that could be seen.
        """
        for transfer_id, writers in self._writers.items():
            for name in sorted(writers.keys() & open_writes):
                if can_tell(writers[name], transfer_id):
                    message = f"{writers[name]} does not say that it writes no more under {name}, of {transfer_id}"
                    broken(Rule.R5, message, transfer_id, name)
                if missed(writers[name]):
                    message = f"no rank looks for the end of {writers[name]}, which may write under {name}"
                    broken(Rule.END, message, transfer_id, name)

    def may_write(self, life: str, open_writes: frozenset[str]) -> bool:
        """Whether writes of that life of a source are expected."""
        return any(
            of == life and name in open_writes for writers in self._writers.values() for name, of in writers.items()
        )

    def life_began(self) -> None:
        """Another memory, which is not written yet."""
        self._writers.clear()
        self._ended.clear()
        self._proved.clear()
        self._gone.clear()
        self._rest.life_began()
