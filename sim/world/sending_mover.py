"""Movers of ranks that also know a data path on which the source's rank sends (`groups`)."""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from kvgrpc.core.actions import AnswerSend, MapPeer, Operation, Send, UnmapPeer
from kvgrpc.core.events import Event, PeerMapped
from sim.world.agenda import Agenda
from sim.world.faults import Faults
from sim.world.groups import Groups, Name
from sim.world.memory import Memory, MemoryDoor
from sim.world.mover import NEVER, Mover, Posting
from sim.world.wires import Wires

COLLECTIVE = "collective"


class SendingMover(Mover):
    """A mover that reads from ranks that offer it over a wire, one posting after the other; all else as in `Mover`."""

    def __init__(  # noqa: PLR0913, PLR0917 - as in `Mover`
        self,
        agenda: Agenda,
        rng: Random,
        faults: Faults,
        memories: list[Memory],
        report: Callable[[Event], None],
        seen: Counter[str] | None,
        wires: Wires,
        *,
        tame: bool = False,
    ) -> None:
        super().__init__(agenda, rng, faults, memories, report, seen, tame=tame)
        self._groups = Groups(self, wires, memories, self._luck, report)
        self._wired: set[Name] = set()
        """Ranks of peers from which it reads over a wire."""
        self._begun: set[Posting] = set()

    @property
    def resumes_at(self) -> float:
        """The time until which the movers' processes are stopped."""
        return self._paused_until

    def map(self, action: MapPeer, door: MemoryDoor | None) -> None:
        """Maps the memory of a rank's peer. If both ranks can send, both must come."""
        name = action.rank, action.peer, action.endpoint.rank
        usable = door is not None and door.open and name not in self._mapped and not self._groups.reaches(name)
        if action.endpoint.collective is None or not usable or self._luck.strikes("break_mapping"):
            super().map(action, door)
            return

        def mapped(why: str) -> None:
            if not why:
                assert door is not None
                self._mapped[name] = door
                self._wired.add(name)
            path, rejected = ("", ((COLLECTIVE, why),)) if why else (COLLECTIVE, ())
            self._report(PeerMapped(*name[:2], path, "simulated", rejected, action.attempt, name[2]))

        self._groups.map(action, mapped)

    def unmap(self, action: UnmapPeer) -> None:
        """Unmaps like `Mover`. What was asked for at the peer may still arrive."""
        super().unmap(action)
        self._wired = {name for name in self._wired if name in self._mapped}
        self._groups.unmap(action)

    def send(self, action: Send) -> None:
        """Lets a rank send, or meet the peer's rank."""
        self._groups.send(action)

    def answered(self, action: AnswerSend) -> bool:
        return self._groups.answered(action)

    def end_all(self, rank: int) -> None:
        """Ends like `Mover`, including all that the rank sends and receives."""
        self._groups.end_all(rank)
        super().end_all(rank)

    def stop_rank(self, rank: int) -> None:
        """Ends the process of one rank, and its sends."""
        self._groups.end_all(rank)
        super().stop_rank(rank)

    def retire(self, at_rest: Callable[[], None]) -> None:
        """Ends the life like `Mover`. What was not begun never is."""
        self._groups.retire()
        super().retire(at_rest)

    def begin(self, posting: Any) -> None:
        """Starts a read whose cells are sent."""
        posting.cells = [(posting.sent.get(src, src), dst) for src, dst in posting.cells]
        self._begun.add(posting)
        self._start(posting)

    def fail(self, posting: Any) -> None:
        """Ends a posting that has not ended."""
        if posting in self._postings:
            self._end(posting, done=False)

    def _start(self, posting: Posting) -> None:
        name = posting.post.rank, posting.post.peer, posting.post.peer_rank
        if posting in self._begun or name not in self._wired:
            super()._start(posting)
            return
        if posting.post.operation is not Operation.READ:
            # The push began over another data path. Nobody writes over this one.
            self.later(posting.post.rank, 0.0, lambda: self.fail(posting))
            return
        posting.lost_at = NEVER  # the rank knows when its wire no longer accesses memory
        self._groups.read(name, posting)

    def _copy(self, posting: Posting, chunk: int) -> None:
        wire = posting.wire
        if wire is None or posting not in self._postings:
            super()._copy(posting, chunk)
        elif wire.broken:
            self._end(posting, done=False)
        elif (at := wire.resumes_at()) > self._agenda.now:
            self.later(posting.post.rank, at - self._agenda.now, lambda: self._copy(posting, chunk))
        else:
            super()._copy(posting, chunk)

    def _end(self, posting: Posting, *, done: bool, may_be_late: bool = True) -> None:
        self._begun.discard(posting)
        self._groups.ended(posting, done=done)
        super()._end(posting, done=done, may_be_late=may_be_late)
