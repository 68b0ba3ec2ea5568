"""Unit tests of the simulator's parts: what each models and reports."""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from kvgrpc.core.actions import MapPeer, Operation, Post, UnmapPeer
from kvgrpc.core.events import Event, PeerMapped, PostingEnded
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.core.values.strips import Repack, Strip
from sim.engine.blocks import BlockManager
from sim.world.agenda import Agenda
from sim.world.faults import Faults, Luck
from sim.world.memory import UNWRITTEN, Cell, KvStore, Memory, MemoryDoor, Prompt, layout
from sim.world.mover import Mover
from tests.core.nodes import endpoint, ids

POOL = layout(8)
PROMPT = Prompt(tuple(range(40)))


# -- agenda


def test_things_happen_in_the_order_of_time_and_of_being_put_there() -> None:
    agenda = Agenda()
    seen: list[str] = []
    for when, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (-5.0, "now")):
        agenda.at(when, lambda name=name: seen.append(name))  # type: ignore[misc]
    assert not agenda.run(until=1.5)
    assert (seen, agenda.now, agenda.events) == (["now", "a", "b"], 1.0, 3)
    agenda.after(0.25, lambda: agenda.at(0.0, lambda: seen.append("at once")))
    assert agenda.run(until=9.0)
    assert seen[3:] == ["at once", "c"]


# -- blocks


def test_the_last_freed_are_given_out_first_and_references_are_counted() -> None:
    blocks = BlockManager(POOL)
    taken = blocks.take(40)
    assert taken is not None
    assert [len(group) for group in taken] == [3, 2]
    blocks.share(taken)
    assert [len(group) for group in blocks.free(taken)] == [0, 0]
    assert [group.tolist() for group in blocks.free(taken)] == [group.tolist() for group in taken]
    again = blocks.take(16)
    assert again is not None
    assert again[0].tolist() == [taken[0][-1]]
    blocks.free(again)
    blocks.check_idle()


def test_without_room_nothing_is_taken() -> None:
    blocks = BlockManager(POOL)
    assert blocks.take(16 * 9) is None
    blocks.check_idle()
    taken = blocks.take(16 * 8)
    assert taken is not None
    with pytest.raises(AssertionError):
        blocks.check_idle()
    blocks.free(taken)
    with pytest.raises(AssertionError, match="twice"):
        blocks.free(taken)
    with pytest.raises(AssertionError):
        blocks.share(taken)


def test_blocks_of_a_prefix_are_those_that_lie_in_it_whole() -> None:
    blocks = BlockManager(POOL)
    taken = blocks.take(64)
    assert taken is not None
    assert [len(group) for group in blocks.first(taken, 40)] == [2, 1]
    assert [len(group) for group in blocks.rest(taken, 40)] == [2, 1]


# -- memory


@pytest.fixture
def memory() -> Memory:
    return Memory(POOL, 0, KvStore())


BLOCKS = (ids(4, 2, 7), ids(1, 0))


def test_computed_blocks_hold_the_kv_of_their_prompt(memory: Memory) -> None:
    memory.compute(BLOCKS, PROMPT)
    memory.check_holds(BLOCKS, PROMPT, 40)
    memory.check_holds(BLOCKS, Prompt((*PROMPT.tokens[:35], 99)), 35)
    for wrong in (Prompt((*PROMPT.tokens[:39], 99)), Prompt(PROMPT.tokens, "salt")):
        with pytest.raises(AssertionError, match="other KV"):
            memory.check_holds(BLOCKS, wrong, 40)
    with pytest.raises(AssertionError, match="other KV"):
        memory.check_holds((ids(2, 4, 7), ids(1, 0)), PROMPT, 40)


def test_kv_of_another_rank_or_layer_is_other_kv() -> None:
    store = KvStore()
    number = store.number(Cell(PROMPT, 1, 0))
    assert number == store.number(Cell(PROMPT, 1, 0))
    assert store.holds(number, Cell(Prompt(PROMPT.tokens[:8]), 1, 0))
    for wrong in (Cell(PROMPT, 0, 0), Cell(PROMPT, 1, 1), Cell(Prompt((*PROMPT.tokens, 1)), 1, 0)):
        assert not store.holds(number, wrong)
    assert not store.holds(UNWRITTEN, Cell(Prompt(()), 1, 0))


def test_given_blocks_are_touched_by_their_transfer_only(memory: Memory) -> None:
    memory.give(BLOCKS, "t")
    memory.arrive(4, 1, "t")
    misuses: tuple[Callable[[], None], ...] = (
        lambda: memory.compute(BLOCKS, PROMPT),
        lambda: memory.scrub(BLOCKS),
        lambda: memory.give(BLOCKS, "u"),
        lambda: memory.arrive(4, 1, "u"),
        lambda: memory.arrive(3, 1, "t"),
    )
    for misuse in misuses:
        with pytest.raises(AssertionError):
            misuse()
    memory.take_back(BLOCKS)
    with pytest.raises(AssertionError, match="the engine"):
        memory.arrive(4, 1, "t")
    memory.compute(BLOCKS, PROMPT)


def test_a_life_that_is_over_leaves_rubbish(memory: Memory) -> None:
    memory.compute(BLOCKS, PROMPT)
    memory.burn()
    with pytest.raises(AssertionError, match="other KV"):
        memory.check_holds(BLOCKS, PROMPT, 1)


# -- movers


class Bench:
    """A mover between two memories."""

    def __init__(self, **faults: Any) -> None:
        self.agenda = Agenda()
        store = KvStore()
        self.source, self.own = Memory(POOL, 0, store), Memory(POOL, 0, store)
        self.source.compute(BLOCKS, PROMPT)
        self.own.give(BLOCKS, "t")
        self.reports: list[Event] = []
        self.mover = Mover(self.agenda, Random(1), Faults(**faults), [self.own], self.reports.append)
        self.mover.map(MapPeer(0, "p@1", endpoint(), 1), MemoryDoor("p@1/0.0", self.source))
        cells = ids(*range(24))
        self.runs = Runs(cells[:1], cells[:1], ids(24))

    def post(self) -> list[PostingEnded]:
        self.own.take_back(BLOCKS)
        everything = (ids(*range(8)), ids(*range(8)))
        self.own.give(everything, "t")
        self.mover.post(Post(0, "t/0", "p@1", self.runs, "t"))
        self.agenda.run(until=1e6)
        return [report for report in self.reports if isinstance(report, PostingEnded)]


def test_a_posting_copies_everything() -> None:
    bench = Bench()
    assert bench.post() == [PostingEnded("t/0", True, 24)]
    assert bench.own.cells == bench.source.cells
    assert isinstance(bench.reports[0], PeerMapped)
    assert bench.reports[0].data_path == "loopback"


def test_a_posting_sees_what_changes_under_it() -> None:
    bench = Bench()
    bench.source.compute((ids(*range(8)), ids(*range(8))), Prompt(tuple(range(256))))
    bench.agenda.after(0.01, bench.source.burn)
    bench.post()
    assert 0 < sum(cell != UNWRITTEN for cell in bench.own.cells) < 24


def test_a_broken_posting_ends_in_the_middle() -> None:
    bench = Bench(break_posting=1.0)
    (report,) = bench.post()
    assert (report.done, report.quiesced, report.nbytes) == (False, True, 0)


def test_a_lost_posting_goes_on_after_it_was_reported() -> None:
    bench = Bench(lose_posting=1.0)
    lost, proved = bench.post()
    assert (lost.done, lost.quiesced) == (False, False)
    assert (proved.done, proved.quiesced) == (False, True)
    assert bench.own.cells == bench.source.cells


def test_a_stalled_posting_takes_long() -> None:
    bench = Bench(stall=1.0, stall_s=(100.0, 100.0))
    assert bench.post()[0].done
    assert bench.agenda.now > 100.0


def test_what_is_not_mapped_cannot_be_posted() -> None:
    bench = Bench()
    bench.mover.unmap(UnmapPeer(0, "p@1"))
    with pytest.raises(KeyError):
        bench.post()
    broken = Bench(break_mapping=1.0)
    broken.agenda.run(until=1.0)
    assert [report.data_path for report in broken.reports if isinstance(report, PeerMapped)] == [""]


def test_a_mover_that_was_stopped_says_and_writes_nothing() -> None:
    bench = Bench()
    bench.agenda.run(until=1.0)
    bench.agenda.after(0.001, bench.mover.stop)
    assert bench.post() == []


def test_the_end_of_a_posting_may_be_reported_late() -> None:
    bench = Bench(report_late=1.0, slow_s=(50.0, 50.0))
    assert bench.post() == [PostingEnded("t/0", True, 24)]
    assert bench.agenda.now > 50.0


def test_a_mover_that_is_paused_goes_on_afterwards() -> None:
    bench = Bench()
    bench.agenda.after(0.005, lambda: bench.mover.pause(30.0))
    assert bench.post() == [PostingEnded("t/0", True, 24)]
    assert 30.0 < bench.agenda.now < 31.0


def test_a_rank_refuses_to_map_a_peer_that_it_has_mapped_and_answers_each_attempt_by_its_number() -> None:
    bench = Bench()
    bench.mover.map(MapPeer(0, "p@1", endpoint(), 2), MemoryDoor("p@1/0.0", bench.source))
    bench.agenda.run(until=10.0)
    answers = {report.attempt: report.data_path for report in bench.reports if isinstance(report, PeerMapped)}
    assert answers == {1: "loopback", 2: ""}


@pytest.mark.parametrize("rekeyed", [False, True])
def test_what_a_dead_process_sent_lands_unless_the_data_path_began_anew(rekeyed: bool) -> None:
    bench = Bench(land_late=1.0, slow_s=(5.0, 5.0))
    bench.source.give((ids(*range(8)), ids(*range(8))), "theirs")
    door = MemoryDoor("p@1/0.0", bench.source)
    bench.mover.unmap(UnmapPeer(0, "p@1"))
    bench.mover.map(MapPeer(0, "p@1", endpoint(), 2), door)
    rest: list[float] = []

    def die() -> None:
        bench.mover.retire(lambda: rest.append(bench.agenda.now))
        bench.mover.stop()
        door.renewed = rekeyed

    bench.mover.post(Post(0, "t/0", "p@1", bench.runs, "t", Operation.WRITE, "theirs"))
    bench.agenda.after(0.001, die)
    before = list(bench.source.cells)
    bench.own.cells = [1] * 24
    bench.agenda.run(until=1.0)
    assert bench.source.cells == before
    assert not rest
    bench.agenda.run(until=10.0)
    assert (bench.source.cells != before) is not rekeyed
    assert rest == [pytest.approx(5.001)]


def test_a_rank_reads_several_ranks_of_a_peer_and_forgets_all_at_once() -> None:
    bench = Bench()
    other = Memory(POOL, 1, KvStore(), ranks=2)
    bench.mover.map(MapPeer(0, "p@1", RankEndpoint(1), 2), MemoryDoor("p@1/1.0", other))
    other.cells = [5] * 24
    everything = (ids(*range(8)), ids(*range(8)))
    bench.own.take_back(BLOCKS)
    bench.own.give(everything, "t")
    half = ids(0), ids(12)
    bench.mover.post(Post(0, "t/0", "p@1", Runs(half[0], half[0], half[1]), "t"))
    bench.mover.post(Post(0, "t/1", "p@1", Runs(half[1], half[1], half[1]), "t", peer_rank=1))
    bench.agenda.run(until=1e6)
    assert bench.own.cells == [*bench.source.cells[:12], *other.cells[12:]]
    assert {report.peer_rank for report in bench.reports if isinstance(report, PeerMapped)} == {0, 1}
    bench.mover.unmap(UnmapPeer(0, "p@1"))
    for rank in range(2):
        with pytest.raises(KeyError):
            bench.mover.post(Post(0, "t/2", "p@1", bench.runs, "t", peer_rank=rank))


def test_a_re_pack_copies_run_by_run_what_was_staged() -> None:
    bench = Bench()
    bench.own.take_back(BLOCKS)
    everything = (ids(*range(8)), ids(*range(8)))
    bench.own.give(everything, "t")
    staged = Runs(ids(0, 12), ids(6, 0), ids(6, 6))
    strip = Strip(ids(1, 7), ids(20, 0), (2,), (2,), (2,), 1)
    bench.mover.post(Post(0, "t/0", "p@1", staged, "t", repack=Repack((strip,), 12)))
    bench.agenda.run(until=1e6)
    assert bench.reports[-1] == PostingEnded("t/0", True, 4)
    source, want = bench.source.cells, [UNWRITTEN] * 24
    want[20], want[22], want[0], want[2] = source[13], source[15], source[1], source[3]
    assert bench.own.cells == want


def test_a_rank_dies_without_the_others() -> None:
    bench = Bench()
    bench.mover.stop_rank(1)
    assert bench.post() == [PostingEnded("t/0", True, 24)]


# -- luck


def test_what_goes_wrong_is_counted_and_what_never_does_draws_nothing() -> None:
    seen: Counter[str] = Counter()
    luck = Luck(Random(1), Faults(slow=0.5), seen)
    state = luck.rng.getstate()
    assert not luck.strikes("stall")
    assert luck.rng.getstate() == state
    struck = sum(luck.strikes("slow") for _ in range(100))
    assert 0 < struck < 100
    assert seen == {"slow": struck}
    assert Faults(slow=0.5, stall=0.1).without("slow") == Faults(stall=0.1)
