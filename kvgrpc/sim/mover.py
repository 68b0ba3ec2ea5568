"""Modelled movers: a posting copies cell by cell over virtual time, whatever happens to the source meanwhile."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from kvgrpc.core.actions import MapPeer, Post, UnmapPeer
from kvgrpc.core.events import Event, PeerMapped, PostingEnded
from kvgrpc.sim.agenda import Agenda
from kvgrpc.sim.faults import Faults
from kvgrpc.sim.memory import Memory

CHUNKS = 6
"""Into how many steps a posting falls at most: enough for a source to change under it."""


@dataclass(eq=False)
class _Posting:
    post: Post
    source: Memory
    cells: list[tuple[int, int]] = field(default_factory=list)
    breaks_at: int = -1
    """Cells left when it ends with an error; -1 for never."""
    stalls_at: int = -1


class Mover:
    """The movers of all ranks of one life of an engine."""

    def __init__(self, agenda: Agenda, rng: Random, faults: Faults, report: Callable[[Event], None]) -> None:
        self._agenda = agenda
        self._rng = rng
        self._faults = faults
        self._report = report
        self.memories: list[Memory] = []
        self.in_flight: set[str] = set()
        self._mapped: dict[tuple[int, str], Memory] = {}
        self.stopped = False

    def map(self, action: MapPeer, memory: Memory | None) -> None:
        """A rank reaches for its peer's memory; None when nothing is there."""
        works = memory is not None and self._rng.random() >= self._faults.break_mapping
        rejected = () if works else (("loopback", "the simulator breaks this one"),)
        if works and memory is not None:
            self._mapped[action.rank, action.peer] = memory
        report = PeerMapped(action.rank, action.peer, "loopback" if works else "", "simulated", rejected)
        self._later(self._faults.draw(self._rng, self._faults.delay_s), lambda: self._report(report))

    def unmap(self, action: UnmapPeer) -> None:
        """New postings from that peer are impossible; those in flight go on."""
        self._mapped.pop((action.rank, action.peer), None)

    def post(self, action: Post) -> None:
        """Starts a posting."""
        posting = _Posting(action, self._mapped[action.rank, action.peer])
        runs = zip(action.runs.src.tolist(), action.runs.dst.tolist(), action.runs.nbytes.tolist(), strict=True)
        posting.cells = [(src + i, dst + i) for src, dst, count in runs for i in range(count)]
        posting.cells.reverse()
        if self._rng.random() < self._faults.break_posting:
            posting.breaks_at = self._rng.randrange(len(posting.cells))
        if self._rng.random() < self._faults.stall:
            posting.stalls_at = self._rng.randrange(len(posting.cells))
        self.in_flight.add(action.posting_id)
        self._step(posting, -(-len(posting.cells) // CHUNKS))

    def _step(self, posting: _Posting, chunk: int) -> None:
        delay_s = self._faults.draw(self._rng, self._faults.cell_s) * chunk
        if posting.stalls_at >= 0 and len(posting.cells) <= posting.stalls_at + chunk:
            posting.stalls_at = -1
            delay_s += self._faults.draw(self._rng, self._faults.stall_s)
        self._later(delay_s, lambda: self._copy(posting, chunk))

    def _copy(self, posting: _Posting, chunk: int) -> None:
        own = self.memories[posting.post.rank]
        for _ in range(min(chunk, len(posting.cells))):
            if len(posting.cells) == posting.breaks_at:
                self._end(posting, done=False)
                return
            src, dst = posting.cells.pop()
            own.arrive(dst, posting.source.cells[src], posting.post.transfer_id)
        if posting.cells:
            self._step(posting, chunk)
        else:
            self._end(posting, done=posting.breaks_at != 0)

    def _end(self, posting: _Posting, *, done: bool) -> None:
        post = posting.post
        self.in_flight.discard(post.posting_id)
        nbytes = post.runs.total_bytes if done else 0
        self._report(PostingEnded(post.posting_id, done, nbytes, message="" if done else "the simulator broke it"))

    def _later(self, delay_s: float, do: Callable[[], None]) -> None:
        def if_alive() -> None:
            if not self.stopped:
                do()

        self._agenda.after(delay_s, if_alive)
