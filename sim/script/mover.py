"""Movers that a script operates: a posting has two halves, and stops where the script says."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvgrpc.core.actions import AnswerSend, MapPeer, Operation, Post, Send, UnmapPeer
from kvgrpc.core.events import Event, PeerMapped, PostingEnded
from sim.world.agenda import Agenda, Deed
from sim.world.faults import Faults
from sim.world.groups import Groups
from sim.world.memory import UNWRITTEN, Memory, MemoryDoor
from sim.world.mover import Mover
from sim.world.posted import cells_of
from sim.world.wires import Wire, Wires

START, HALF, END = "start", "half", "end"
STOPS = (START, HALF, END)
"""Stops of a posting: before its first byte, in the middle, and before its end is reported."""
BREAK, CORRUPT, DOUBT = "break", "corrupt", "doubt"
"""Faults in the middle of a posting: it ends there, its next cell arrives as something else, or it is reported as
failed and goes on.
"""
MAP_S = 0.001


@dataclass(eq=False)
class Hand:
    """The script's settings for the movers of a host, in all its lives."""

    bytes_s: float = 0.002
    """Duration of a posting, in seconds."""
    hold_at: str = ""
    hold_rank: int | None = None
    """Rank whose postings are held; None means every rank."""
    fault: str = ""
    """Fault of the next posting."""
    unmappable: bool = False
    """True if no rank can reach a peer."""
    rekey_proves: bool = True
    """True if a re-key proves that nothing arrives any more that peers had sent before."""
    waiting: list[Deed] = field(default_factory=list)

    def holds(self, stop: str, rank: int) -> bool:
        """Returns True if a posting waits at that stop."""
        return self.hold_at == stop and self.hold_rank in (None, rank)

    def resume(self) -> None:
        """Lets everything that waits check again if it must wait."""
        waiting, self.waiting = self.waiting, []
        for do in waiting:
            do()


@dataclass(eq=False)
class _HandPosting:
    post: Post
    owner: str
    """The transfer that owns the cells that the posting fills."""
    source: Memory
    sink: Memory
    door: MemoryDoor
    """The peer's door."""
    cells: list[tuple[int, int]]
    """Cells that are left to copy, last first."""
    fills: list[int]
    bytes_s: float
    reads: list[int]
    can: Callable[[], bool]
    """Returns True if the posting can still write."""
    at: str = START
    corrupted: bool = False
    """True if the posting's next cell arrives as something else."""
    doubted: bool = False
    wire: Wire | None = None
    sent: dict[int, int] = field(default_factory=dict)
    """Wire and moved cells: see `wires.WireRead`."""


class HandMover(Mover):
    """The movers of one life. With `sends`, its ranks send to other ranks that do, whenever they are asked to."""

    def __init__(
        self, agenda: Agenda, memories: list[Memory], report: Callable[[Event], None], hand: Hand, wires: Wires,
        *, sends: bool,
    ) -> None:  # fmt: skip
        super().__init__(agenda, Random(0), Faults(), memories, report)  # noqa: S311 - nothing is drawn
        self._hand = hand
        self._sends = sends
        self._groups = Groups(self, wires, memories, self._luck, report)
        self._open: dict[_HandPosting, None] = {}
        """Postings that are not over."""
        self._rested: Deed | None = None
        self._over = False
        self._paused_until = 0.0

    @property
    def reaches(self) -> list[str]:
        """The lives whose memory is mapped here."""
        return sorted({peer for _, peer, _ in self._mapped})

    def map(self, action: MapPeer, door: MemoryDoor | None) -> None:
        """Maps the memory of a rank's peer. `door` is None if nothing is there."""
        found = door is not None and door.open and not self._hand.unmappable
        path = "collective" if self._sends and action.endpoint.collective is not None else "loopback"

        def mapped(why: str) -> None:
            if door is not None and not why:
                self._mapped[action.rank, action.peer, action.endpoint.rank] = door
            via, tried = ("", ((path, why),)) if why else (path, ())
            self._report(
                PeerMapped(action.rank, action.peer, via, "by hand", tried, action.attempt, action.endpoint.rank)
            )

        if found and path == "collective":
            self._groups.map(action, mapped)
            return
        if door is not None and found:
            self._mapped[action.rank, action.peer, action.endpoint.rank] = door
        self._then(MAP_S, lambda: mapped("" if found else "the script breaks this one"))

    def unmap(self, action: UnmapPeer) -> None:
        """Lets a rank forget a peer completely."""
        super().unmap(action)
        self._groups.unmap(action)

    def send(self, action: Send) -> None:
        """Lets a rank send, or meet the peer's rank."""
        self._groups.send(action)

    def answered(self, action: AnswerSend) -> bool:
        return self._groups.answered(action)

    def post(self, action: Post) -> None:
        """Starts a posting."""
        door = self._mapped[action.rank, action.peer, action.peer_rank]
        own, theirs = self._memories[action.rank], door.memory
        source, sink = (own, theirs) if action.operation is Operation.WRITE else (theirs, own)
        cells = cells_of(action, own.cell_bytes)
        owner = action.fills or action.transfer_id
        fills = [dst for _, dst in cells]
        bytes_s, can = self._hand.bytes_s, lambda: door.open
        reads = [src for src, _ in cells] if action.operation is Operation.WRITE else []
        posting = _HandPosting(action, owner, source, sink, door, cells[::-1], fills, bytes_s, reads, can)
        sink.fill(posting.fills, owner, posting.can)
        source.read(posting.reads, action.posting_id)
        self._open[posting] = None
        name = action.rank, action.peer, action.peer_rank
        if self._groups.reaches(name):
            assert action.operation is Operation.READ, "no script reaches a peer by one data path, and then by another"
            self._groups.read(name, posting)
        else:
            self._turn(posting)

    def begin(self, posting: Any) -> None:
        """Starts a read whose cells are sent."""
        posting.cells = [(posting.sent.get(src, src), dst) for src, dst in posting.cells]
        self._turn(posting)

    def fail(self, posting: Any) -> None:
        """Ends a posting that has not ended."""
        if posting in self._open:
            self._finish(posting, done=False)

    @property
    def resumes_at(self) -> float:
        """The time until which the movers' processes are stopped."""
        return self._paused_until

    def end_all(self, rank: int) -> None:
        """Restarts the data path of a rank, which ends its postings."""
        self._groups.end_all(rank)
        for posting in [posting for posting in self._open if posting.post.rank == rank]:
            self._finish(posting, done=False)

    def stop(self) -> None:
        """Ends the process: nothing is written or reported any more."""
        self._over = True
        for rank in range(len(self._memories)):
            self._dead.add(rank)
            self._groups.end_all(rank)
        for posting in self._open:
            posting.sink.filled(posting.fills, posting.can)
        self._open.clear()
        self._look()

    def pause(self, for_s: float) -> None:
        """Stops the processes: whatever they were about to do, they do afterwards."""
        self._paused_until = self._agenda.now + for_s

    def retire(self, at_rest: Deed) -> None:
        """Ends the life. `at_rest` is called when the last posting has ended, in any way."""
        self._rested = at_rest
        self._groups.retire()
        self._look()

    def _turn(self, posting: _HandPosting) -> None:
        """Moves a posting from one stop to the next, unless it is held there."""
        hand = self._hand
        if posting not in self._open:
            return  # it was ended
        if not posting.door.open or (posting.wire is not None and posting.wire.broken):
            self._finish(posting, done=False)
        elif posting.wire is not None and posting.wire.resumes_at() > self._agenda.now:
            self._then(posting.wire.resumes_at() - self._agenda.now, lambda: self._turn(posting))
        elif hand.holds(posting.at, posting.post.rank):
            hand.waiting.append(lambda: self._if_running(lambda: self._turn(posting)))
        elif posting.at == HALF and hand.fault:
            self._befall(posting)
        elif posting.at == END:
            self._finish(posting, done=not posting.doubted)
        else:
            self._then(posting.bytes_s / 2, lambda: self._move(posting))

    def _move(self, posting: _HandPosting) -> None:
        """Moves half of a posting's bytes."""
        if posting not in self._open or not posting.door.open:
            self._turn(posting)
            return
        left = len(posting.fills) // 2 if posting.at == START else 0
        posting.at = HALF if posting.at == START else END
        while len(posting.cells) > left:
            src, dst = posting.cells.pop()
            number = posting.source.cells[src]
            if posting.corrupted:
                number, posting.corrupted = UNWRITTEN, False
                self._corrupted.add(posting.owner)
            posting.sink.arrive(dst, number, posting.owner)
        self._turn(posting)

    def _befall(self, posting: _HandPosting) -> None:
        fault, self._hand.fault = self._hand.fault, ""
        if fault == BREAK:
            self._finish(posting, done=False)
            return
        if fault == CORRUPT:
            posting.corrupted = True
            self._turn(posting)
            return
        posting.doubted = True
        self._hand.hold_at, self._hand.hold_rank = HALF, posting.post.rank
        self._tell_end(posting, done=False, quiesced=False)
        self._turn(posting)

    def _finish(self, posting: _HandPosting, *, done: bool) -> None:
        posting.sink.filled(posting.fills, posting.can)
        posting.source.let_go(posting.reads, posting.post.posting_id)
        del self._open[posting]
        self._groups.ended(posting, done=done)
        self._tell_end(posting, done=done)
        self._look()

    def _tell_end(self, posting: _HandPosting, *, done: bool, quiesced: bool = True) -> None:
        post = posting.post
        nbytes = len(posting.fills) if done else 0
        message = "" if done else "the script broke it"
        self._report(PostingEnded(post.posting_id, done, nbytes, message=message, quiesced=quiesced))
        if done and post.checksums is not None:
            self.sum(post.checksums)

    def _look(self) -> None:
        if not self._open and self._rested is not None:
            rested, self._rested = self._rested, None
            rested()

    def _if_running(self, do: Deed) -> None:
        if self._agenda.now < self._paused_until:
            self._agenda.at(self._paused_until, lambda: self._if_running(do))
        elif not self._over:
            do()

    def _then(self, delay_s: float, do: Deed) -> None:
        self._agenda.after(delay_s, lambda: self._if_running(do))
