"""The allocator of a server-managed pool: it gives out blocks that are neither allocated nor pinned."""

from typing import Any

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvgrpc.core.tables.allocator import ALLOCATION_BYTES, RETRY_DELAY_S, Allocator, Terms
from kvgrpc.core.tables.ledger import Ledger, RowKind
from kvgrpc.core.tables.pins import PinKind, PinTable
from kvgrpc.core.values.block_ids import Blocks, kept_bytes
from kvgrpc.core.values.owners import ENGINE
from kvgrpc.errors import Exhausted, PreconditionFailed, Reason
from tests.core.nodes import ids, refused


def make(*sizes: int) -> tuple[Allocator, PinTable]:
    pins = PinTable(sizes)
    return Allocator(sizes, pins), pins


def take(allocator: Allocator, allocation_id: str, counts: dict[int, int]) -> Blocks:
    """Makes an allocation, and returns its blocks."""
    blocks = allocator.choose(counts)
    allocator.take(allocation_id, blocks, Terms(ENGINE))
    return blocks


def test_the_lowest_ids_are_taken_first() -> None:
    allocator, _ = make(8, 4)
    taken = take(allocator, "a", {0: 3, 1: 1})
    assert [group.tolist() for group in taken] == [[0, 1, 2], [0]]
    assert [group.tolist() for group in take(allocator, "b", {0: 2})] == [[3, 4], []]
    assert (allocator.allocated(0), allocator.free_count(0)) == (5, 3)


def test_allocations_are_listed_oldest_first_and_found_by_their_blocks() -> None:
    allocator, _ = make(8, 4)
    take(allocator, "a", {0: 3, 1: 1})
    take(allocator, "b", {0: 2})
    assert list(allocator.rows()) == [("a", Terms(ENGINE)), ("b", Terms(ENGINE))]
    assert [allocator.holders(0, block) for block in (0, 4, 5, 8)] == [{"a"}, {"b"}, set(), set()]
    assert allocator.holders(1, 0) == {"a"}


def test_a_run_is_preferred_to_scattered_blocks() -> None:
    allocator, _ = make(8)
    take(allocator, "a", {0: 8})
    allocator.free((ids(1, 3, 4, 6, 7),))
    assert take(allocator, "b", {0: 2})[0].tolist() == [3, 4]
    assert take(allocator, "c", {0: 3})[0].tolist() == [1, 6, 7]


def test_all_or_none() -> None:
    allocator, _ = make(8, 2)
    with refused(Reason.POOL_EXHAUSTED, Exhausted):
        take(allocator, "a", {0: 1, 1: 3})
    assert allocator.free_count(0) == 8
    assert not allocator.known("a")


def test_a_refusal_says_what_is_free_and_when_to_come_back() -> None:
    allocator, pins = make(4, 4)
    take(allocator, "a", {1: 1})
    pins.add("q", PinKind.TARGET, (ids(), ids(3)), 0.0)
    with pytest.raises(Exhausted, match="group 1 has 2 free blocks of 4; 3 were asked for") as caught:
        take(allocator, "b", {1: 3})
    assert caught.value.retry_delay_s == RETRY_DELAY_S
    assert caught.value.metadata == {"group": "1", "free_block_count": "2"}


def test_a_free_block_that_is_pinned_is_not_given_out() -> None:
    allocator, pins = make(4)
    pins.add("q", PinKind.TARGET, (ids(0, 2),), 0.0)
    assert allocator.free_count(0) == 2
    assert take(allocator, "a", {0: 2})[0].tolist() == [1, 3]


def test_a_block_is_freed_once() -> None:
    allocator, _ = make(4)
    take(allocator, "a", {0: 2})
    allocator.free((ids(1),))
    with refused(Reason.BLOCK_NOT_ALLOCATED, PreconditionFailed):
        allocator.check_usable((ids(1),), "", ENGINE)
    assert allocator.allocated(0) == 1


def test_nothing_is_remembered_of_allocations_that_hold_no_block() -> None:
    allocator, _ = make(4)
    take(allocator, "a", {0: 2})
    take(allocator, "b", {0: 2})
    allocator.free((ids(0, 1),))
    allocator.free_allocation("b")
    assert (allocator._numbers, allocator._ids, allocator._left) == ({}, {}, {})


def test_blocks_of_several_allocations_are_freed_at_once() -> None:
    allocator, _ = make(4, 4)
    take(allocator, "a", {0: 1, 1: 1})
    take(allocator, "b", {0: 1})
    allocator.free((ids(0, 1), ids()))
    assert (allocator.known("a"), allocator.known("b")) == (True, False)


def test_a_pinned_block_comes_free_at_its_last_unpin() -> None:
    allocator, pins = make(2)
    take(allocator, "a", {0: 2})
    pins.add("l", PinKind.LEASE, (ids(0),), 0.0)
    allocator.free((ids(0, 1),))
    assert take(allocator, "b", {0: 1})[0].tolist() == [1]
    with refused(Reason.POOL_EXHAUSTED):
        take(allocator, "c", {0: 1})
    pins.drop("l", PinKind.LEASE)
    assert take(allocator, "c", {0: 1})[0].tolist() == [0]


def test_blocks_that_are_not_allocated_or_not_of_the_allocation_that_is_stated_are_refused() -> None:
    allocator, _ = make(6)
    take(allocator, "a", {0: 2})
    take(allocator, "b", {0: 2})
    allocator.check_usable((ids(0, 1),), "a", ENGINE)
    allocator.check_usable((ids(0, 2),), "", ENGINE)
    wrong = [(ids(0, 4), ""), (ids(0, 4), "a"), (ids(0, 2), "a"), (ids(0, 1), "b"), (ids(0, 1), "c"), (ids(4), "c")]
    for blocks, allocation in wrong:
        with refused(Reason.BLOCK_NOT_ALLOCATED, PreconditionFailed):
            allocator.check_usable((blocks,), allocation, ENGINE)


def test_an_allocation_is_known_until_its_last_block_is_freed() -> None:
    allocator, _ = make(4, 4)
    take(allocator, "a", {0: 2, 1: 1})
    allocator.free((ids(0), ids()))
    found = allocator.find("a")
    assert found is not None
    assert [group.tolist() for group in found] == [[1], [0]]
    allocator.free((ids(1), ids(0)))
    assert not allocator.known("a")
    assert allocator.find("a") is None


def test_an_allocation_is_given_back_whole_and_once() -> None:
    allocator, _ = make(4)
    take(allocator, "a", {0: 2})
    take(allocator, "b", {0: 2})
    allocator.free((ids(0),))
    allocator.free_allocation("a")
    allocator.free_allocation("a")
    assert allocator.free_count(0) == 2
    allocator.check_usable((ids(2, 3),), "", ENGINE)


def test_an_allocation_keeps_the_memory_of_its_own_blocks_alone() -> None:
    allocator = Allocator((1 << 16,), PinTable((1 << 16,)))
    allocator.take("a", allocator.choose({0: 2}), Terms(ENGINE))
    found = allocator.find("a")
    assert found is not None
    whole = found[0] if found[0].base is None else found[0].base
    assert whole.nbytes == 2 * found[0].itemsize


class Looked(np.ndarray[Any, Any]):
    """An array that counts how many of its elements are looked at."""

    count = 0

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **fields: Any) -> Any:
        Looked.count += self.size
        return getattr(ufunc, method)(*(np.asarray(each) for each in inputs), **fields)

    def __array_function__(self, func: Any, _types: Any, args: Any, kwargs: Any) -> Any:
        Looked.count += self.size
        return func(*(np.asarray(each) if each is self else each for each in args), **kwargs)

    def __getitem__(self, key: Any) -> Any:
        found = np.asarray(self)[key]
        Looked.count += np.size(found)
        return found


@pytest.mark.parametrize("freed", [1, 2, 64, 127])
def test_all_allocations_that_are_partly_free_are_found_by_less_than_two_looks_at_the_pool(freed: int) -> None:
    pool, each = 1 << 14, 128
    allocator, _ = make(pool)
    taken = [take(allocator, str(number), {0: each})[0] for number in range(pool // each)]
    rest = np.random.default_rng(freed).permutation(each)[freed:]
    for blocks in taken:
        allocator.free((np.delete(blocks, rest),))
    allocator._holder = [holder.view(Looked) for holder in allocator._holder]
    Looked.count = 0
    for number, blocks in enumerate(taken):
        found = allocator.find(str(number))
        assert found is not None
        assert found[0].tolist() == blocks[np.sort(rest)].tolist()
    assert Looked.count <= 2 * len(taken) * (each - freed)


def test_what_is_freed_block_by_block_is_looked_at_a_few_times() -> None:
    count = 1 << 10
    allocator, _ = make(count)
    take(allocator, "a", {0: count})
    allocator._holder = [holder.view(Looked) for holder in allocator._holder]
    Looked.count = 0
    for block in range(count):
        allocator.free((ids(block),))
    assert not allocator.known("a")
    assert Looked.count <= 4 * count


@pytest.mark.parametrize("parts", [[range(0, 1 << 16, 2)], [range(1 << 15), range(1 << 15, (1 << 16) - 1)]])
def test_what_is_left_of_an_allocation_weighs_what_it_takes(parts: list[range]) -> None:
    """A run that is partly freed in several places is no longer kept as a run."""
    ledger = Ledger()
    allocator = Allocator((1 << 16,), PinTable((1 << 16,)), ledger)
    take(allocator, "a", {0: 1 << 16})
    for part in parts:
        allocator.free((np.arange(part.start, part.stop, part.step),))
    found = allocator.find("a")
    assert found is not None
    assert ledger.rows(RowKind.ALLOCATION) == allocator.kept_bytes
    assert allocator.kept_bytes["a"] - ALLOCATION_BYTES - 1 == kept_bytes(found)


class Allocations(RuleBasedStateMachine):
    """Free, allocated and pinned blocks add up after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator, self.pins = make(8)
        self.held: dict[str, set[int]] = {}
        self.pinned: set[int] = set()
        self.made = 0

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        free = set(range(8)) - self.pinned - set().union(*self.held.values())
        self.made += 1
        if count > len(free):
            with refused(Reason.POOL_EXHAUSTED):
                take(self.allocator, str(self.made), {0: count})
            return
        taken = set(take(self.allocator, str(self.made), {0: count})[0].tolist())
        assert taken <= free
        self.held[str(self.made)] = taken

    @rule(blocks=st.sets(st.integers(0, 7), min_size=1, max_size=3))
    def free(self, blocks: set[int]) -> None:
        if not blocks <= set().union(*self.held.values()):
            with refused(Reason.BLOCK_NOT_ALLOCATED):
                self.allocator.check_usable((ids(*sorted(blocks)),), "", ENGINE)
            return
        ended = self.allocator.free((ids(*sorted(blocks)),))
        assert set(ended) == {name for name, kept in self.held.items() if kept and kept <= blocks}
        self.held = {name: kept - blocks for name, kept in self.held.items() if kept - blocks}

    @rule(number=st.integers(1, 9))
    def free_allocation(self, number: int) -> None:
        self.allocator.free_allocation(str(number))
        self.held.pop(str(number), None)

    @rule(block=st.integers(0, 7))
    def pin(self, block: int) -> None:
        if block in self.pinned:
            self.pins.drop(str(block), PinKind.LEASE)
        else:
            self.pins.add(str(block), PinKind.LEASE, (ids(block),), 0.0)
        self.pinned ^= {block}

    @invariant()
    def it_adds_up(self) -> None:
        held = set().union(*self.held.values())
        assert self.allocator.allocated(0) == len(held)
        assert self.allocator.free_count(0) == 8 - len(held | self.pinned)
        assert all(self.allocator.known(name) == (name in self.held) for name in map(str, range(1, self.made + 1)))


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(stateful_step_count=25)
