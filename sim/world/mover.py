"""Modelled movers: a posting copies cell by cell over virtual time, even if the source changes meanwhile."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

import numpy as np

from kvgrpc.core.actions import AnswerSend, ComputeChecksums, CopyOut, MapPeer, Operation, Post, Send, UnmapPeer
from kvgrpc.core.events import ChecksumsComputed, CopiedOut, Event, PeerMapped, PostingEnded, SendPosted
from kvgrpc.core.tables.transfers import Transfer
from kvgrpc.errors import Reason
from sim.rules import Rule, broken
from sim.world.agenda import Agenda
from sim.world.faults import Faults, Luck
from sim.world.memory import UNWRITTEN, Memory, MemoryDoor, sum_of
from sim.world.mirror import MirroredMemory
from sim.world.posted import cells_of
from sim.world.process_ends import Ends
from sim.world.wires import Wire

CHUNKS = 6
"""Maximum number of steps of a posting: enough for a source to change during it."""
NEVER = -1
SUMMED_FIRST = 0.5
"""Share of the postings with checksums whose sums are reported before their end."""
OWN_AT_REST = 0.5
"""Share of the lost writes that have left their source and go on to the peer."""


@dataclass(eq=False)
class Posting:
    """A posting that is not over, or was just begun."""

    post: Post
    owner: str
    """The transfer that owns the cells that the posting fills."""
    source: Memory
    sink: Memory
    door: MemoryDoor
    """The peer's door."""
    cells: list[tuple[int, int]] = field(default_factory=list)
    """Cells that are left to copy, last first."""
    filled: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    """Cells of the mover's own engine that the posting reads."""
    can: Callable[[], bool] = lambda: True
    """Returns True if the posting can still write."""
    breaks_at: int = NEVER
    """Number of cells left when the posting ends with an error."""
    lost_at: int = NEVER
    """Number of cells left when the posting is reported as failed, and goes on."""
    stalls_at: int = NEVER
    corrupt_at: int = NEVER
    """Number of cells left when one arrives as something else."""
    sums: ComputeChecksums | None = None
    """Checksums to compute when the posting is over."""
    wire: Wire | None = None
    sent: dict[int, int] = field(default_factory=dict)
    """Wire and moved cells: see `wires.WireRead`."""


class Mover:
    """The movers of all ranks of one life of an engine. They write into `memories[rank]`.

    Movers of a liar are `tame`: they write into a peer's cell only while that is given to what they fill.
    """

    def __init__(  # noqa: PLR0913 - what a mover is made of
        self,
        agenda: Agenda,
        rng: Random,
        faults: Faults,
        memories: list[Memory],
        report: Callable[[Event], None],
        seen: Counter[str] | None = None,
        *,
        tame: bool = False,
    ) -> None:
        self._agenda = agenda
        self._rng = rng
        self._luck = Luck(rng, faults, seen)
        self._memories = memories
        self._report = report
        self._mapped: dict[tuple[int, str, int], MemoryDoor] = {}
        """Doors by rank, peer and rank of the peer."""
        self._dead: set[int] = set()
        """Ranks whose process is gone."""
        self._tame = tame
        self._paused_until = 0.0
        self._postings: dict[Posting, None] = {}
        """Postings that are not over."""
        self._corrupted: set[str] = set()
        """Transfers of which something arrived as something else."""
        self._copies_out: dict[int, deque[CopyOut]] = {}
        """Copies that each rank must make into its mirror, in order."""
        self._held: list[Posting] = []
        """Postings that wait for such copies."""
        self._landing = 0
        """Number of dead processes' writes of which something is still on the wire."""
        self._at_rest: Callable[[], None] | None = None
        # What a rank sees is a message of its own, after all current work.
        self.ends = Ends(len(memories), self._reached, lambda seen: agenda.after(0.0, lambda: report(seen)))
        """Ends of peers' processes, as the ranks of this life see them."""

    def map(self, action: MapPeer, door: MemoryDoor | None) -> None:
        """Maps the memory of a rank's peer. `door` is None if nothing is there. Refused if it is mapped already."""
        name = action.rank, action.peer, action.endpoint.rank
        twice = name in self._mapped
        broken = door is None or not door.open or self._luck.strikes("break_mapping") or twice
        if door is not None and not broken:
            self._mapped[name] = door
        report = PeerMapped(
            action.rank,
            action.peer,
            "" if broken else "loopback",
            "simulated",
            (("loopback", "it is mapped already" if twice else "the simulator breaks this one"),) if broken else (),
            action.attempt,
            action.endpoint.rank,
        )
        self.answer(action.rank, lambda: self._report(report), self._luck.draw(self._luck.faults.delay_s))

    def unmap(self, action: UnmapPeer) -> None:
        """Makes new postings from that peer impossible. Those in flight go on."""
        self.ends.unmap(action)
        for peer_rank in self._reached(action.rank, action.peer):
            del self._mapped[action.rank, action.peer, peer_rank]

    def post(self, action: Post) -> None:
        """Starts a posting."""
        door = self._mapped[action.rank, action.peer, action.peer_rank]
        own, theirs = self._memories[action.rank], door.memory
        writes = action.operation is Operation.WRITE
        source, sink = (own, theirs) if writes else (theirs, own)
        posting = Posting(action, action.fills or action.transfer_id, source, sink, door, sums=action.checksums)
        posting.cells = cells_of(action, own.cell_bytes)
        posting.filled = [dst for _, dst in posting.cells]
        posting.read = [src for src, _ in posting.cells] if writes else []
        theirs_read = [] if writes else [src for src, _ in posting.cells]
        own_cells, their_cells = (posting.read, posting.filled) if writes else (posting.filled, theirs_read)
        _check_within(own_cells, own, action)
        if their_cells and not 0 <= min(their_cells) <= max(their_cells) < len(theirs.cells):
            # The peer's layout promises more memory than there is.
            self.later(action.rank, 0.0, lambda: self._tell(posting, done=False))
            return
        own.read(posting.read, action.posting_id)
        posting.can = lambda: not writes or (door.open and not self._tame)
        if posting.can():
            posting.sink.fill(posting.filled, posting.owner, posting.can)
        self._postings[posting] = None
        # A data path writes in an order of its own.
        at = self._rng.randrange(len(posting.cells))
        posting.cells = posting.cells[at:] + posting.cells[:at]
        posting.breaks_at = self._somewhere(posting, "break_posting")
        posting.lost_at = self._somewhere(posting, "lose_posting")
        posting.stalls_at = self._somewhere(posting, "stall")
        posting.corrupt_at = self._somewhere(posting, "corrupt")
        self._start(posting)

    def send(self, action: Send) -> None:
        """Refuses a send: the rank has no data path that sends."""
        refused = SendPosted(action.rank, action.name, message="this rank sends nothing")
        self.answer(action.rank, lambda: self._report(refused))

    def answered(self, _: AnswerSend) -> bool:
        """Takes the answer to a rank's ask. Returns True if it was still waited for."""
        return False

    def copy_out(self, action: CopyOut) -> None:
        """Lets a rank copy into its mirror, after all earlier copies."""
        queue = self._copies_out.setdefault(action.rank, deque())
        queue.append(action)
        if len(queue) == 1:
            self._begin_copy(action.rank)

    def sum(self, action: ComputeChecksums) -> None:
        """Lets a rank compute checksums of blocks as they are in a moment."""
        delay_s = self._luck.draw(self._luck.faults.cell_s)
        self.answer(action.rank, lambda: self._report(self._summed(action)), delay_s)

    def answer(self, rank: int, do: Callable[[], None], after_s: float = 0.0) -> None:
        """Lets a rank do what it is asked for, sooner or later."""
        if self._luck.strikes("mute"):
            after_s += self._luck.draw(self._luck.faults.stall_s)
        self.later(rank, after_s, do)

    def end_all(self, rank: int) -> None:
        """Restarts the data path of a rank, which ends its postings, also lost ones."""
        for posting in [posting for posting in self._postings if posting.post.rank == rank]:
            self._end(posting, done=False, may_be_late=False)

    def stop(self) -> None:
        """Ends the processes: nothing is written or reported any more."""
        for rank in range(len(self._memories)):
            self.stop_rank(rank)

    def stop_rank(self, rank: int) -> None:
        """Ends the process of one rank."""
        self._dead.add(rank)
        for posting in [posting for posting in self._postings if posting.post.rank == rank]:
            del self._postings[posting]
            writes = posting.post.operation is Operation.WRITE and not self._tame
            if writes and self._luck.strikes("land_late"):
                self._leave_on_wire(posting)
            else:
                posting.sink.filled(posting.filled, posting.can)
        self._check_at_rest()

    def check_blamed(self, transfer: Transfer) -> None:
        """Checks that a transfer that failed by checksums had a corrupted cell."""
        failure = transfer.failure
        if failure and failure.reason is Reason.CHECKSUM_MISMATCH and transfer.id not in self._corrupted:
            broken(Rule.R2, f"{transfer.id} failed by checksums, and all arrived as it was", transfer.id)

    @property
    def busy(self) -> bool:
        """True if postings are in flight."""
        return bool(self._postings)

    @property
    def landing(self) -> bool:
        """True if something that dead processes sent is still on the wire."""
        return self._landing > 0

    def pause(self, for_s: float) -> None:
        """Stops the processes: whatever they were about to do, they do afterwards."""
        self._paused_until = max(self._paused_until, self._agenda.now + for_s)

    def retire(self, at_rest: Callable[[], None]) -> None:
        """Ends the life. `at_rest` is called when the last posting has ended, in any way, and has landed."""
        self._at_rest = at_rest
        self._check_at_rest()

    def _reached(self, rank: int, peer: str) -> list[int]:
        return [peer_rank for mine, name, peer_rank in self._mapped if (mine, name) == (rank, peer)]

    def _check_at_rest(self) -> None:
        if not self._postings and not self._landing and self._at_rest is not None:
            at_rest, self._at_rest = self._at_rest, None
            at_rest()

    def _leave_on_wire(self, posting: Posting) -> None:
        """Lets a dead process's last sends land, unless the peer's data path restarts before."""
        sent = [(dst, posting.source.outside[src]) for src, dst in posting.cells[-CHUNKS:]]
        can = posting.can = lambda: posting.door.open and not posting.door.renewed
        self._landing += 1
        posting.sink.left_on_wire(posting.filled, can)

        def land() -> None:
            for dst, number in sent if can() else ():
                posting.sink.arrive(dst, number, posting.owner)
            posting.sink.filled(posting.filled, posting.can)
            self._landing -= 1
            self._check_at_rest()

        self._agenda.after(self._luck.draw(self._luck.faults.slow_s), land)

    def _summed(self, action: ComputeChecksums) -> ChecksumsComputed:
        """Returns the checksums of the blocks as they are now."""
        cells, pieces, at = self._memories[action.rank].outside, action.pieces, 0
        found = []
        for count in pieces.counts.tolist():
            found.append(sum_of(cells, pieces.offsets[at : at + count].tolist()))
            at += count
        return ChecksumsComputed(action.rank, action.name, np.array(found, dtype="<u4").tobytes())

    def _somewhere(self, posting: Posting, kind: str) -> int:
        """Returns a random number of cells left, from 1, at which a fault happens, or NEVER."""
        return 1 + self._rng.randrange(len(posting.cells)) if self._luck.strikes(kind) else NEVER

    def _step(self, posting: Posting, chunk: int) -> None:
        delay_s = self._luck.draw(self._luck.faults.cell_s) * chunk
        if posting.stalls_at != NEVER and len(posting.cells) <= posting.stalls_at + chunk:
            posting.stalls_at = NEVER
            delay_s += self._luck.draw(self._luck.faults.stall_s)
        self.later(posting.post.rank, delay_s, lambda: self._copy(posting, chunk))

    def _copy(self, posting: Posting, chunk: int) -> None:
        if posting not in self._postings:
            return  # it was ended
        if not posting.door.open:
            self._end(posting, done=False)
            return
        for _ in range(min(chunk, len(posting.cells))):
            left = len(posting.cells)
            if left == posting.lost_at:
                self._tell(posting, done=False, quiesced=False)
            if posting not in self._postings:
                return  # its process died of this report
            if left == posting.breaks_at:
                self._end(posting, done=False)
                return
            src, dst = posting.cells.pop()
            number = posting.source.outside[src]
            if left == posting.corrupt_at:
                number = UNWRITTEN
                self._corrupted.add(posting.owner)
            if not self._tame or posting.sink.given.get(dst) == posting.owner:
                posting.sink.arrive(dst, number, posting.owner)
        if posting.cells:
            self._step(posting, chunk)
        else:
            self._arrived(posting)

    def _arrived(self, posting: Posting) -> None:
        """Ends a posting whose bytes are all there, or are in its rank's mirror and must land."""
        rank, sink = posting.post.rank, posting.sink
        if isinstance(sink, MirroredMemory) and sink is self._memories[rank]:
            self.later(rank, self._luck.draw(self._luck.faults.cell_s), partial(self._land, posting, sink))
        else:
            self._end(posting, done=posting.lost_at == NEVER)

    def _land(self, posting: Posting, memory: MirroredMemory) -> None:
        """Copies a posting's bytes to the rank's device, and ends the posting."""
        if posting not in self._postings:
            return  # it was ended
        broken = self._luck.strikes("break_copy")
        if not broken:
            memory.land(posting.filled, posting.owner)
        self._end(posting, done=posting.lost_at == NEVER and not broken)

    def _start(self, posting: Posting) -> None:
        """Starts a posting. A read waits for copies into its mirror cells, which are of a hand-over that has ended."""
        copies = self._copies_out.get(posting.post.rank, ())
        coming = {cell for action in copies for cell in self._cells_of(action)}
        if posting.post.operation is Operation.READ and not coming.isdisjoint(posting.filled):
            self._held.append(posting)
        else:
            self._step(posting, -(-len(posting.cells) // CHUNKS))

    def _begin_copy(self, rank: int) -> None:
        self.answer(rank, lambda: self._copied_out(rank), self._luck.draw(self._luck.faults.cell_s))

    def _copied_out(self, rank: int) -> None:
        action, memory = self._copies_out[rank].popleft(), self._memories[rank]
        assert isinstance(memory, MirroredMemory), "a lead asked a rank for copies that has no mirror"
        broken = self._luck.strikes("break_copy")
        if not broken:
            memory.copy_out(self._cells_of(action))
        if self._copies_out[rank]:
            self._begin_copy(rank)
        held, self._held = self._held, []
        for posting in held:
            if posting in self._postings:
                self._start(posting)
        self._report(CopiedOut(rank, action.name, "the simulator broke it" if broken else ""))

    def _cells_of(self, action: CopyOut) -> list[int]:
        each = self._memories[action.rank].cell_bytes
        rows = zip(action.pieces.offsets.tolist(), action.pieces.nbytes.tolist(), strict=True)
        return [at // each + i for at, nbytes in rows for i in range(nbytes // each)]

    def _end(self, posting: Posting, *, done: bool, may_be_late: bool = True) -> None:
        posting.sink.filled(posting.filled, posting.can)
        posting.source.let_go(posting.read, posting.post.posting_id)
        del self._postings[posting]
        if done and posting.sums is not None and self._rng.random() < SUMMED_FIRST:
            sums, posting.sums = posting.sums, None
            self._report(self._summed(sums))
            if posting.post.rank in self._dead:
                return  # its process died of this report
        if may_be_late and self._luck.strikes("report_late"):
            delay_s = self._luck.draw(self._luck.faults.slow_s)
            self.later(posting.post.rank, delay_s, lambda: self._tell(posting, done=done))
        else:
            self._tell(posting, done=done)
        self._check_at_rest()

    def _tell(self, posting: Posting, *, done: bool, quiesced: bool = True) -> None:
        post = posting.post
        nbytes = len(posting.filled) if done else 0
        message = "" if done else "the simulator broke it"
        own = not quiesced and post.operation is Operation.WRITE and self._rng.random() < OWN_AT_REST
        if own:
            posting.source.let_go(posting.read, posting.post.posting_id)
        self._report(PostingEnded(post.posting_id, done, nbytes, message=message, quiesced=quiesced, own_at_rest=own))
        if done and posting.sums is not None:
            self.sum(posting.sums)

    def later(self, rank: int, delay_s: float, do: Callable[[], None]) -> None:
        """Calls `do` after a delay, not while the processes are stopped, and never once the rank's process is gone."""

        def if_alive() -> None:
            if rank in self._dead:
                return
            if self._agenda.now < self._paused_until:
                self._agenda.at(self._paused_until, if_alive)
            else:
                do()

        self._agenda.after(delay_s, if_alive)


def _check_within(cells: list[int], memory: Memory, action: Post) -> None:
    if cells and not 0 <= min(cells) <= max(cells) < len(memory.cells):
        broken(Rule.R1, f"posting {action.posting_id} leaves the memory of its own engine", action.transfer_id)
