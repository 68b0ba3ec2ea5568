"""Modelled movers: a posting copies cell by cell over virtual time, whatever happens to the source meanwhile."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from kvgrpc.core.actions import MapPeer, Post, UnmapPeer
from kvgrpc.core.events import Event, PeerMapped, PostingEnded
from kvgrpc.core.operation import Operation
from kvgrpc.sim.agenda import Agenda
from kvgrpc.sim.faults import Faults
from kvgrpc.sim.memory import Door, Memory

CHUNKS = 6
"""Into how many steps a posting falls at most: enough for a source to change under it."""
NEVER = -1
OWN_AT_REST = 0.5
"""Of the writes that are lost: what left their source goes on to the peer."""


@dataclass(eq=False)
class _Posting:
    post: Post
    owner: str
    """The transfer to which what it fills was given."""
    source: Memory
    sink: Memory
    door: Door
    """Of its peer."""
    cells: list[tuple[int, int]] = field(default_factory=list)
    """What is left to copy, last first."""
    filled: list[int] = field(default_factory=list)
    breaks_at: int = NEVER
    """Cells left when it ends with an error."""
    lost_at: int = NEVER
    """Cells left when it is reported as failed, and goes on."""
    stalls_at: int = NEVER


class Mover:
    """The movers of all ranks of one life of an engine. `memories[rank]` is what they write into."""

    def __init__(
        self, agenda: Agenda, rng: Random, faults: Faults, memories: list[Memory], report: Callable[[Event], None]
    ) -> None:
        self._agenda = agenda
        self._rng = rng
        self._faults = faults
        self._memories = memories
        self._report = report
        self._mapped: dict[tuple[int, str], Door] = {}
        self._stopped = False
        self._postings: dict[_Posting, None] = {}
        """Those that are not over."""
        self._at_rest: Callable[[], None] | None = None

    def map(self, action: MapPeer, door: Door | None) -> None:
        """A rank reaches for its peer's memory; None when nothing is there."""
        broken = door is None or not door.open or self._faults.hits(self._rng, self._faults.break_mapping)
        if door is not None and not broken:
            self._mapped[action.rank, action.peer] = door
        report = PeerMapped(
            action.rank,
            action.peer,
            "" if broken else "loopback",
            "simulated",
            (("loopback", "the simulator breaks this one"),) if broken else (),
        )
        self._later(self._faults.draw(self._rng, self._faults.delay_s), lambda: self._report(report))

    def unmap(self, action: UnmapPeer) -> None:
        """New postings from that peer are impossible; those in flight go on."""
        self._mapped.pop((action.rank, action.peer), None)

    def post(self, action: Post) -> None:
        """Starts a posting."""
        door = self._mapped[action.rank, action.peer]
        own, theirs = self._memories[action.rank], door.memory
        writes = action.operation is Operation.WRITE
        source, sink = (own, theirs) if writes else (theirs, own)
        posting = _Posting(action, action.fills or action.transfer_id, source, sink, door)
        runs = zip(action.runs.src.tolist(), action.runs.dst.tolist(), action.runs.nbytes.tolist(), strict=True)
        posting.cells = [(src + i, dst + i) for src, dst, count in runs for i in range(count)]
        posting.filled = [dst for _, dst in posting.cells]
        posting.sink.fill(posting.filled, posting, door)
        self._postings[posting] = None
        posting.cells.reverse()
        posting.breaks_at = self._somewhere(posting, self._faults.break_posting)
        posting.lost_at = self._somewhere(posting, self._faults.lose_posting)
        posting.stalls_at = self._somewhere(posting, self._faults.stall)
        self._step(posting, -(-len(posting.cells) // CHUNKS))

    def end_all(self, rank: int) -> None:
        """The data path of a rank begins anew: its postings are over, also those that were lost."""
        for posting in [posting for posting in self._postings if posting.post.rank == rank]:
            self._end(posting, done=False)

    def stop(self) -> None:
        """The process is gone: nothing is written or reported any more."""
        for posting in self._postings:
            posting.sink.filled(posting)
        self._stopped = True

    def retire(self, at_rest: Callable[[], None]) -> None:
        """Its life is over: `at_rest` is called when its last posting has ended, in whatever way."""
        self._at_rest = at_rest
        self._check_at_rest()

    def gone(self) -> None:
        """It was stopped: if its life was over before, that life is at rest now."""
        if self._postings and self._at_rest is not None:
            self._at_rest()

    def _check_at_rest(self) -> None:
        if not self._postings and self._at_rest is not None:
            self._at_rest()

    def _somewhere(self, posting: _Posting, probability: float) -> int:
        return self._rng.randrange(len(posting.cells)) if self._faults.hits(self._rng, probability) else NEVER

    def _step(self, posting: _Posting, chunk: int) -> None:
        delay_s = self._faults.draw(self._rng, self._faults.cell_s) * chunk
        if posting.stalls_at != NEVER and len(posting.cells) <= posting.stalls_at + chunk:
            posting.stalls_at = NEVER
            delay_s += self._faults.draw(self._rng, self._faults.stall_s)
        self._later(delay_s, lambda: self._copy(posting, chunk))

    def _copy(self, posting: _Posting, chunk: int) -> None:
        if posting not in self._postings:
            return  # it was ended
        if not posting.door.open:
            self._end(posting, done=False)
            return
        for _ in range(min(chunk, len(posting.cells))):
            left = len(posting.cells)
            if left == posting.lost_at:
                self._tell(posting, done=False, quiesced=False)
            if left == posting.breaks_at:
                self._end(posting, done=False)
                return
            src, dst = posting.cells.pop()
            posting.sink.arrive(dst, posting.source.cells[src], posting.owner)
        if posting.cells:
            self._step(posting, chunk)
        else:
            self._end(posting, done=posting.breaks_at != 0 and posting.lost_at == NEVER)

    def _end(self, posting: _Posting, *, done: bool) -> None:
        posting.sink.filled(posting)
        self._tell(posting, done=done)
        del self._postings[posting]
        self._check_at_rest()

    def _tell(self, posting: _Posting, *, done: bool, quiesced: bool = True) -> None:
        post = posting.post
        nbytes = post.runs.total_bytes if done else 0
        message = "" if done else "the simulator broke it"
        own = not quiesced and post.operation is Operation.WRITE and self._rng.random() < OWN_AT_REST
        self._report(PostingEnded(post.posting_id, done, nbytes, message=message, quiesced=quiesced, own_at_rest=own))

    def _later(self, delay_s: float, do: Callable[[], None]) -> None:
        def if_alive() -> None:
            if not self._stopped:
                do()

        self._agenda.after(delay_s, if_alive)
