"""Tracks who may write into the blocks of a lead's engine, and which writers the lead knows to have stopped."""

from collections.abc import Callable, Iterable

from kvgrpc.core.actions import Expect
from kvgrpc.core.events import Event, ProcessEnded, Rekeyed, ReleaseQuarantine
from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.transfers import Direction, Disposition, Transfer
from sim.checks.rest import Rest, Word
from sim.rules import Rule, broken

CanTell = Callable[[str, str], bool]
"""Returns True if the source's life lives, knows this lead, and saw that its postings no longer fill a transfer."""


class WriterAudit:
    """The writers of one lead, in one life of its engine."""

    def __init__(self) -> None:
        self._writers: dict[str, dict[str, str]] = {}
        """Accesses under which a source may write, as ranks name them, with the source's life; by transfer."""
        self._ended: dict[str, dict[tuple[int, int], bool]] = {}
        """Pairs (rank, peer's rank) of which the rank saw the peer's process end, and if nothing of it lands; by
        life.
        """
        self._proved: set[str] = set()
        """Accesses under which, as was seen, nothing is written any more."""
        self._gone: set[str] = set()
        """Lives that, as was seen, write nothing any more."""
        self._rest = Rest()
        self._heard: Event | None = None

    def hears(self, event: Event, state: NodeState) -> None:
        """Takes note of an event before the lead handles it."""
        self._heard = event
        if isinstance(event, Word):
            self._rest.hears(event, state.access.rows)
        elif isinstance(event, ProcessEnded) and event.peer in state.peers.lives:
            self.process_ended(event, len(state.peers.lives[event.peer].bridges.pairs))

    def expects(self, action: Expect) -> None:
        """Takes note that the lead expects writes under an access, or checks its reason for expecting no more."""
        if action.open:
            self._rest.expects(action.access)
        else:
            of_all = isinstance(self._heard, Rekeyed | ReleaseQuarantine)
            self._rest.believed(action.access, proved=lambda life: of_all or life in self._gone)

    def changed(self, transfer: Transfer) -> None:
        """Takes note of a changed transfer. Returned blocks must not be written any more."""
        if transfer.direction is Direction.RECEIVE and transfer.memory is Disposition.RETURNED:
            self._rest.returned(transfer.id)

    def granted(self, access_id: bytes, transfer_id: str, life: str) -> None:
        """Takes note that a source may write under an access."""
        self._writers.setdefault(transfer_id, {})[f"w-{access_id.hex()}"] = life
        self._rest.granted(access_id, transfer_id)

    def process_ended(self, event: ProcessEnded, pairs: int) -> None:
        """Takes note that a process of a peer has ended. The peer's processes form `pairs` pairs of ranks with this
        engine.
        """
        ended = self._ended.setdefault(event.peer, {})
        ended[event.rank, event.peer_rank] = event.drained
        if len(ended) == pairs and all(ended.values()):
            self._gone.add(event.peer)
            for writers in self._writers.values():
                self._proved.update(name for name, life in writers.items() if life == event.peer)

    def check_heeded(self, open_writes: frozenset[str]) -> None:
        """Checks that the lead expects no writes of writers that it knows to be gone."""
        if not self._proved.isdisjoint(open_writes):
            name = min(self._proved & open_writes)
            broken(Rule.END, f"writes under {name} are expected, and their writers are known to be gone", name)

    def check(self, transfers: Iterable[Transfer], open_writes: frozenset[str]) -> None:
        """Checks the quarantine while no posting is in flight here: it holds only blocks that may still be written, as
        far as the lead knows. `open_writes` are the accesses under which the lead still expects writes.
        """
        for transfer in transfers:
            if transfer.memory is not Disposition.QUARANTINED:
                continue
            writers = self._writers.get(transfer.id, {}).keys() & open_writes
            if transfer.direction is Direction.SEND or not writers:
                broken(Rule.END, f"{transfer.id} is in quarantine, and all its postings have ended", transfer.id)
        self.check_heeded(open_writes)

    def check_told(self, open_writes: frozenset[str], can_tell: CanTell, missed: Callable[[str], bool]) -> None:
        """Checks after all leads have been reached again: every source has told that it writes no more, and no visible
        end of a source was `missed`.
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
        """Returns True if writes of that life of a source are expected."""
        return any(
            of == life and name in open_writes for writers in self._writers.values() for name, of in writers.items()
        )

    def life_began(self) -> None:
        """Starts a new life, whose memory is not written yet."""
        self._writers.clear()
        self._ended.clear()
        self._proved.clear()
        self._gone.clear()
        self._rest.life_began()
