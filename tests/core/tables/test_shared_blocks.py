"""Pins and allocations of groups that share a block space: a block is one group's at a time, and is counted once."""

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvgrpc.core.tables.allocator import Allocator, Terms
from kvgrpc.core.tables.pins import EXCLUSIVE, Pin, PinKind, PinTable
from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.owners import ENGINE
from kvgrpc.errors import Exhausted, PreconditionFailed, Reason
from tests.core.nodes import ids, refused

LEASE, TARGET, ACCESS = PinKind.LEASE, PinKind.TARGET, PinKind.ACCESS


def table() -> PinTable:
    """Makes a table in which groups 0 and 2 share a space of 8 blocks; group 1 has 4 of its own."""
    return PinTable((8, 4, 8), (0, 1, 0))


def in_group(group: int, *blocks: int) -> Blocks:
    return tuple(ids(*blocks) if i == group else ids() for i in range(3))


@pytest.mark.parametrize("first", PinKind)
@pytest.mark.parametrize("second", PinKind)
def test_a_block_is_pinned_as_of_one_group_of_its_space_at_a_time(first: PinKind, second: PinKind) -> None:
    pins = table()
    pins.add("a", first, in_group(0, 1, 2), 0.0)
    for refuse in (pins.check_free_for, lambda kind, blocks: pins.add("b", kind, blocks, 0.0)):
        with refused(Reason.BLOCK_PINNED, PreconditionFailed):
            refuse(second, in_group(2, 3, 2))
    pins.add("b", second, in_group(2, 3), 0.0)
    pins.add("c", second, in_group(1, 2), 0.0)
    pins.check()
    pins.drop("a", first)
    pins.add("a", first, in_group(2, 1, 2), 0.0)
    pins.check()


def test_a_conflict_names_the_group_as_of_which_the_block_is_pinned() -> None:
    pins = table()
    pins.add("l-1", LEASE, in_group(2, 5), 0.0)
    with pytest.raises(PreconditionFailed, match="block 5 of group 0 is pinned by lease l-1 as a block of group 2"):
        pins.check_free_for(TARGET, in_group(0, 5))
    with pytest.raises(PreconditionFailed, match=r"block 5 of group 2 is pinned by lease l-1$"):
        pins.check_free_for(TARGET, in_group(2, 5))


def test_a_pin_is_extended_by_no_block_of_another_group() -> None:
    pins = table()
    pins.add("a", LEASE, in_group(0, 1), 0.0)
    with refused(Reason.BLOCK_PINNED, PreconditionFailed):
        pins.extend("a", LEASE, in_group(2, 1), 0.0)
    pins.extend("a", LEASE, in_group(2, 2), 0.0)
    with refused(Reason.BLOCK_PINNED, PreconditionFailed):
        pins.add("b", LEASE, in_group(0, 2), 0.0)
    pins.check()


def test_what_is_counted_is_counted_once_for_a_space() -> None:
    pins = table()
    pins.add("t", TARGET, (ids(0), ids(0), ids(1)), 0.0)
    pins.add("l", LEASE, (ids(2), ids(), ids(3)), 0.0)
    pins.soften("l", LEASE)
    pins.quarantine("t", 1.0)
    pins.give_out(2, ids(4))
    assert (pins.free, pins.quarantined, pins.soft) == ([3, 3], [2, 1], [2, 0])
    assert pins.pinned_mask(0).tolist() == pins.pinned_mask(2).tolist() == [True] * 4 + [False] * 4
    assert [pins.count_blocks(0, kind) for kind in (LEASE, PinKind.QUARANTINE, TARGET)] == [2, 2, 0]
    assert pins.reclaimable(0) == 2
    assert [pin.owner for pin in pins.of_block(0, 1)] == [pin.owner for pin in pins.of_block(2, 1)] == ["t"]
    none = pins.none()
    assert none[0] is none[2]
    pins.check()


def test_a_pin_as_of_another_group_than_the_table_knows_is_found() -> None:
    pins = table()
    pins.add("a", LEASE, in_group(0, 1), 0.0)
    pins._pins["a", LEASE] = Pin("a", LEASE, in_group(2, 1), 0.0)
    with pytest.raises(AssertionError):
        pins.check()


def test_groups_of_one_space_get_different_blocks() -> None:
    pins = table()
    allocator = Allocator((8, 4, 8), pins)
    pins.add("l", LEASE, in_group(2, 2), 0.0)
    blocks = allocator.choose({0: 3, 1: 2, 2: 4})
    assert [group.tolist() for group in blocks] == [[3, 4, 5], [0, 1], [0, 1, 6, 7]]
    with pytest.raises(Exhausted, match="group 2 has 2 free blocks of 8; 3 were asked for") as caught:
        allocator.choose({0: 5, 2: 3})
    assert caught.value.metadata == {"group": "2", "free_block_count": "2"}


def test_an_allocated_block_is_a_block_of_the_group_that_it_was_allocated_for() -> None:
    allocator = Allocator((8, 4, 8), table())
    allocator.take("a", (ids(0, 1), ids(), ids(2)), Terms(ENGINE))
    allocator.check_usable((ids(0, 1), ids(), ids(2)), "a", ENGINE)
    for wrong in (in_group(2, 0), in_group(0, 2), in_group(2, 3)):
        for allocation in ("", "a"):
            with refused(Reason.BLOCK_NOT_ALLOCATED, PreconditionFailed):
                allocator.check_usable(wrong, allocation, ENGINE)
    found = allocator.find("a")
    assert found is not None
    assert [group.tolist() for group in found] == [[0, 1], [], [2]]
    assert (allocator.allocated(0), allocator.allocated(1), allocator.free_count(0)) == (3, 0, 5)
    assert allocator.free(in_group(0, 0, 1)) == []
    allocator.take("b", in_group(2, 0, 1), Terms(ENGINE))
    assert allocator.free(in_group(2, 2)) == ["a"]


BLOCKS = 6
GROUPS = st.sampled_from([0, 1])
OWNERS = st.sampled_from("abcd")


class Shared(RuleBasedStateMachine):
    """Two groups of one space, whose blocks are pinned, allocated, softened and quarantined, compared with a model."""

    def __init__(self) -> None:
        super().__init__()
        self.pins = PinTable((BLOCKS, BLOCKS), (0, 0))
        self.allocator = Allocator((BLOCKS, BLOCKS), self.pins)
        self.model: dict[tuple[str, PinKind], dict[int, int]] = {}
        """Pins by owner and kind -> block -> group of the block."""
        self.given: dict[int, int] = {}
        self.soft: set[str] = set()
        self.made = 0

    @rule(owner=OWNERS, kind=st.sampled_from(PinKind), rows=st.dictionaries(st.integers(0, BLOCKS - 1), GROUPS))
    def add(self, owner: str, kind: PinKind, rows: dict[int, int]) -> None:
        if (owner, kind) in self.model:
            return
        conflict = any(
            block in rows and (EXCLUSIVE & {kind, other} or rows[block] != group)
            for (_, other), held in self.model.items()
            for block, group in held.items()
        )
        if conflict:
            with refused(Reason.BLOCK_PINNED, PreconditionFailed):
                self.pins.add(owner, kind, by_group(rows), 0.0)
            return
        self.pins.add(owner, kind, by_group(rows), 0.0)
        self.model[owner, kind] = rows

    @rule(owner=OWNERS, kind=st.sampled_from(PinKind))
    def drop(self, owner: str, kind: PinKind) -> None:
        self.pins.drop(owner, kind)
        self.model.pop((owner, kind), None)
        self.soft -= {owner} if kind is LEASE else set()

    @rule(owner=OWNERS)
    def soften(self, owner: str) -> None:
        self.pins.soften(owner, LEASE)
        self.soft |= {owner} if (owner, LEASE) in self.model else set()

    @rule(owner=OWNERS)
    def quarantine(self, owner: str) -> None:
        if (owner, TARGET) in self.model and (owner, PinKind.QUARANTINE) not in self.model:
            self.pins.quarantine(owner, 0.0)
            self.model[owner, PinKind.QUARANTINE] = self.model.pop((owner, TARGET))

    @rule(first=st.integers(0, 3), second=st.integers(0, 3))
    def allocate(self, first: int, second: int) -> None:
        free = BLOCKS - len(self.pinned() | set(self.given))
        if first + second > free:
            with refused(Reason.POOL_EXHAUSTED):
                self.allocator.choose({0: first, 1: second})
            return
        chosen = self.allocator.choose({0: first, 1: second})
        assert [len(group) for group in chosen] == [first, second]
        rows = {block: group for group, some in enumerate(chosen) for block in some.tolist()}
        assert len(rows) == first + second
        assert not rows.keys() & (self.pinned() | self.given.keys())
        if rows:
            self.made += 1
            self.allocator.take(str(self.made), chosen, Terms(ENGINE))
            self.given |= rows

    @rule(blocks=st.sets(st.integers(0, BLOCKS - 1), min_size=1))
    def free(self, blocks: set[int]) -> None:
        rows = {block: self.given[block] for block in blocks if block in self.given}
        self.allocator.free(by_group(rows))
        self.given = {block: group for block, group in self.given.items() if block not in rows}

    @invariant()
    def it_adds_up(self) -> None:
        self.pins.check()
        pinned, given = self.pinned(), set(self.given)
        assert self.pins.free == [BLOCKS - len(pinned | given)]
        assert self.allocator.allocated(0) == len(given)
        assert np.flatnonzero(self.pins.free_mask(1)).tolist() == sorted(set(range(BLOCKS)) - pinned - given)
        soft = {(owner, LEASE) for owner in self.soft}
        hard = {block for pin, rows in self.model.items() if pin not in soft for block in rows}
        assert self.pins.soft == [len(pinned - hard)]
        assert self.pins.reclaimable(0) == len(pinned - hard - given)
        held = {b for (_, kind), rows in self.model.items() if kind is PinKind.QUARANTINE for b in rows}
        assert self.pins.quarantined == [len(held)]

    def pinned(self) -> set[int]:
        return {block for rows in self.model.values() for block in rows}


def by_group(rows: dict[int, int]) -> Blocks:
    return tuple(ids(*sorted(block for block, other in rows.items() if other == group)) for group in range(2))


TestShared = Shared.TestCase
TestShared.settings = settings(stateful_step_count=25)
