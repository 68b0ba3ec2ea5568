"""Data paths on which both ranks act, as the ranks of one life of an engine know them: they ask, send, and receive.

A destination's rank makes a wire for each epoch and asks the source's rank to come. Then it asks for one send after the
other, under dense numbers, and receives once it has heard that the send is in flight. After a failure, or an answer
that leaves open whether the source sends, the wire is broken. The next read then makes another wire, of the next epoch.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvgrpc.core.actions import AnswerSend, MapPeer, Send, UnmapPeer
from kvgrpc.core.events import Event, SendPosted, SendWanted
from kvgrpc.core.values.sends import MEET, SendAsk, Values
from sim.rules import Rule, broken
from sim.world.faults import Luck
from sim.world.memory import Memory
from sim.world.wires import STALL_S, Wire, WireRead, Wires, cells_in

Name = tuple[int, str, int]
"""A rank, a life of a peer, and a rank of that life."""
OUT_OF_TURN = "is not the next send"
"""Part of a source's error for a number that it does not expect."""


class Refused(Exception):
    """Raised when a rank does not send."""


class Ranks(Protocol):
    """The ranks of the life, and what they do with a posting."""

    def later(self, rank: int, delay_s: float, do: Callable[[], None]) -> None:
        """Calls `do` after a delay, not while the rank's processes are stopped, and never once the rank is dead."""

    def answer(self, rank: int, do: Callable[[], None], after_s: float = 0.0) -> None:
        """Does what the rank is asked for, sooner or later."""

    def begin(self, posting: WireRead) -> None:
        """Starts a posting whose bytes begin to arrive."""

    def fail(self, posting: WireRead) -> None:
        """Ends a posting that is not over."""

    @property
    def resumes_at(self) -> float:
        """The time until which the processes are stopped."""


@dataclass(eq=False)
class _Source:
    """A rank of a peer that sends to one of ours."""

    name: Name
    mapped: Callable[[str], None] | None
    """Callback that is called once: with "" if the rank was reached, else with the reason."""
    epoch: int = 0
    sequence: int = MEET
    asked: bool = False
    """True while the answer to the last ask is missing."""
    built: bool = False
    wire: Wire | None = None
    waiting: deque[WireRead] = field(default_factory=deque)
    """Postings that were not asked for yet, except perhaps the first."""
    closing: bool = False
    """True if the rank is let go once its last posting has ended."""

    @property
    def idle(self) -> bool:
        return not self.waiting and not (self.wire and self.wire.receives)


@dataclass(eq=False)
class _Destination:
    """A rank of a peer to which one of ours sends."""

    epoch: int
    wire: Wire
    sequence: int = MEET


class Groups:
    """The process groups of one life. `wires` are those of the whole world."""

    def __init__(
        self, ranks: Ranks, wires: Wires, memories: list[Memory], luck: Luck, report: Callable[[Event], None]
    ) -> None:
        self._ranks = ranks
        self._wires = wires
        self._memories = memories
        self._luck = luck
        self._report = report
        self._sources: list[_Source] = []
        """All ranks that are reached, or are being let go."""
        self._destinations: dict[Name, _Destination] = {}
        self._epochs: dict[Name, int] = {}
        """Last epoch of each pair, also of a forgotten one, since the peer may know it."""
        self._retired = False

    # -- destination

    def reaches(self, name: Name) -> bool:
        """Returns True if the rank is reached, or about to be."""
        return self._find(name) is not None

    def map(self, action: MapPeer, mapped: Callable[[str], None]) -> None:
        """Reaches for a peer's rank."""
        source = _Source((action.rank, action.peer, action.endpoint.rank), mapped)
        self._sources.append(source)
        self._meet(source)

    def unmap(self, action: UnmapPeer) -> None:
        """Lets a peer's ranks go, each when its last posting has ended. With `gone`, nothing more is sent to them."""
        for source in [source for source in self._sources if source.name[:2] == (action.rank, action.peer)]:
            source.closing, source.mapped = True, None
            self._close_if_idle(source)
        for name in [name for name in self._destinations if action.gone and name[:2] == (action.rank, action.peer)]:
            self._destinations.pop(name).wire.break_("the peer is gone")

    def read(self, name: Name, posting: WireRead) -> None:
        """Queues a posting that reads from a rank that is reached."""
        source = self._find(name)
        assert source is not None, "a lead posts where its rank has reached nothing"
        source.waiting.append(posting)
        self._go_on(source)

    def answered(self, action: AnswerSend) -> bool:
        """Takes the answer to an ask. Returns True if it was still waited for."""
        answer, rank = action.answer, action.rank
        asked = (rank, action.peer, answer.source_rank), answer.epoch, answer.sequence
        source = next((s for s in self._sources if s.asked and (s.name, s.epoch, s.sequence) == asked), None)
        if source is None or source.wire is None or self._retired:
            return False
        source.asked = False
        if answer.sequence == MEET:
            self._met(source, answer.error)
            return True
        posting = source.waiting.popleft()
        if not answer.error:
            self._receive(source, source.wire, posting)
        else:
            if answer.known:
                source.sequence -= 1  # a refused ask takes no number
            else:
                source.wire.break_(answer.error)
            self._fail(rank, posting)
        self._go_on(source)
        return True

    def ended(self, posting: WireRead, *, done: bool) -> None:
        """Takes note that a posting is over, in any way."""
        if posting.wire is not None:
            posting.wire.ended(posting, done=done)
        for source in list(self._sources):
            if posting in source.waiting:
                source.waiting.remove(posting)
            elif source.wire is not posting.wire:
                continue
            self._go_on(source)
            self._close_if_idle(source)

    # -- source

    def send(self, action: Send) -> None:
        """Lets a rank send, or come."""
        delay_s = self._luck.draw(self._luck.faults.cell_s)
        self._ranks.answer(action.rank, lambda: self._report(self._sent(action)), delay_s)

    # -- both

    def end_all(self, rank: int) -> None:
        """Ends all wires of a rank whose data path restarts, or whose process is gone."""
        for source in [source for source in self._sources if source.name[0] == rank]:
            self._sources.remove(source)
            self._break(source, "the data path began anew")
        for name in [name for name in self._destinations if name[0] == rank]:
            self._destinations.pop(name).wire.break_("the source's rank is gone")

    def retire(self) -> None:
        """Ends the life: what was not begun never begins."""
        self._retired = True
        for source in self._sources:
            self._fail_waiting(source)

    def _find(self, name: Name) -> _Source | None:
        return next((source for source in self._sources if source.name == name and not source.closing), None)

    def _sent(self, action: Send) -> SendPosted:
        name, ask, message = (action.rank, action.peer, action.ask.rank), action.ask, ""
        try:
            if ask.meets:
                self._come(name, ask)
            else:
                self._send(name, ask)
        except Refused as error:
            message = str(error)
        values: Values = (("came", b""),) if ask.meets and not message else ()
        return SendPosted(action.rank, action.name, values, message)

    def _come(self, name: Name, ask: SendAsk) -> None:
        before = self._destinations.get(name)
        if before is not None and ask.epoch <= before.epoch:
            raise Refused(f"epoch {ask.epoch} is over")
        if before is not None:
            before.wire.break_("another epoch takes its place")
        wire = self._wires.take(dict(ask.values).get("wire", b""))
        if wire is None:
            raise Refused("nobody waits there")
        wire.resumes_at = lambda: self._ranks.resumes_at
        self._destinations[name] = _Destination(ask.epoch, wire)

    def _send(self, name: Name, ask: SendAsk) -> None:
        destination = self._destinations.get(name)
        if destination is None or destination.epoch != ask.epoch:
            raise Refused(f"there is no wire of epoch {ask.epoch}")
        if destination.wire.broken:
            raise Refused(f"it broke: {destination.wire.broken}")
        if ask.sequence != destination.sequence + 1:
            raise Refused(f"{ask.sequence} {OUT_OF_TURN} after {destination.sequence}")
        if self._luck.strikes("break_posting"):
            destination.wire.break_("the simulator breaks it")
            raise Refused("the simulator breaks it")
        memory = self._memories[name[0]]
        cells = cells_in(ask.offsets, ask.nbytes, memory.cell_bytes)
        if not 0 <= min(cells) <= max(cells) < len(memory.cells):
            broken(Rule.R1, f"rank {name[0]} sends what is not in its memory")
        destination.sequence = ask.sequence
        destination.wire.send(cells)

    def _go_on(self, source: _Source) -> None:
        """Asks for the next posting, one at a time, so that the numbers reach the source in order."""
        if self._retired or source.asked or not source.waiting:
            return
        if source.wire is None or source.wire.broken:
            if source.closing:
                self._fail_waiting(source)
            else:
                self._meet(source)
        elif source.built:
            source.asked, source.sequence = True, source.sequence + 1
            self._want(source, source.wire)

    def _meet(self, source: _Source) -> None:
        """Makes a wire of the next epoch."""
        name, rank = source.name, source.name[0]
        source.epoch = self._epochs[name] = self._epochs.get(name, 0) + 1
        source.sequence, source.asked, source.built = MEET, True, False
        fail = lambda posting: self._fail(rank, posting)
        wire = source.wire = Wire(self._ranks.begin, fail, self._memories[rank].cell_bytes)
        self._want(source, wire, (("wire", self._wires.add(wire)),))

    def _want(self, source: _Source, wire: Wire, values: Values = ()) -> None:
        """Asks under the next number that the source's rank comes, or sends what the first posting reads."""
        rank, peer, peer_rank = source.name
        ask = SendAsk(peer_rank, rank, source.epoch, source.sequence, values=values)

        def want() -> None:
            if source.wire is not wire or self._retired:
                return
            first = source.waiting[0].post if source.waiting else None
            made = ask
            if first is not None and not ask.meets:
                made = replace(ask, offsets=first.runs.src, nbytes=first.runs.nbytes)
            self._report(SendWanted(rank, peer, first.posting_id if first else "", made))

        self._ranks.later(rank, 0.0, want)

    def _met(self, source: _Source, error: str) -> None:
        """Takes the answer of a source's rank that was asked to come."""
        mapped, source.mapped = source.mapped, None
        if error:
            self._break(source, error)
            self._fail_waiting(source)
            if mapped is not None:
                self._sources.remove(source)
        source.built = not error
        if mapped is not None:
            mapped(error)
        self._go_on(source)
        self._close_if_idle(source)

    def _receive(self, source: _Source, wire: Wire, posting: WireRead) -> None:
        wire.receive(posting)

        def starve() -> None:
            if wire.starves(posting):
                wire.break_("nothing came")

        self._ranks.later(source.name[0], STALL_S, starve)

    def _fail_waiting(self, source: _Source) -> None:
        waiting, source.waiting = source.waiting, deque()
        for posting in waiting:
            self._fail(source.name[0], posting)

    def _fail(self, rank: int, posting: WireRead) -> None:
        self._ranks.later(rank, 0.0, lambda: self._ranks.fail(posting))

    def _break(self, source: _Source, why: str) -> None:
        if source.wire is not None:
            source.wire.break_(why)

    def _close_if_idle(self, source: _Source) -> None:
        if source.closing and source.idle and source in self._sources:
            self._sources.remove(source)
            self._break(source, "the peer is let go")
