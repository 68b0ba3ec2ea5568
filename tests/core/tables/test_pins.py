"""Pins: a block without pins is reusable; reads share a block, a target is alone, a quarantine leaves no gap."""

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvgrpc.core.tables.pins import EXCLUSIVE, Pin, PinKind, PinTable
from kvgrpc.errors import PreconditionFailed, Reason
from tests.core.nodes import ids, refused


def table() -> PinTable:
    return PinTable((8, 4))


def test_read_pins_share_a_block() -> None:
    pins = table()
    for owner, kind in (("a", PinKind.LEASE), ("b", PinKind.LEASE), ("a", PinKind.ACCESS)):
        pins.add(owner, kind, (ids(1, 2), ids(0)), 0.0)
    assert len(pins) == 3
    pins.drop("a", PinKind.LEASE)
    assert pins.unpinned(0, ids(0, 1, 2)).tolist() == [0]
    pins.drop("b", PinKind.LEASE)
    pins.drop("a", PinKind.ACCESS)
    assert pins.unpinned(0, ids(0, 1, 2)).tolist() == [0, 1, 2]
    pins.check()


@pytest.mark.parametrize("first", PinKind)
@pytest.mark.parametrize("second", PinKind)
def test_a_target_or_quarantine_is_alone_on_its_block(first: PinKind, second: PinKind) -> None:
    pins = table()
    pins.add("a", first, (ids(1), ids()), 0.0)
    if first in EXCLUSIVE or second in EXCLUSIVE:
        with refused(Reason.BLOCK_PINNED, PreconditionFailed):
            pins.check_free_for(second, (ids(0, 1), ids()))
        with refused(Reason.BLOCK_PINNED, PreconditionFailed):
            pins.add("b", second, (ids(0, 1), ids()), 0.0)
        assert pins.unpinned(0, ids(0, 1)).tolist() == [0]
    else:
        pins.add("b", second, (ids(0, 1), ids()), 0.0)
    pins.add("c", second, (ids(0, 2) if first in EXCLUSIVE or second in EXCLUSIVE else ids(2), ids(3)), 0.0)
    pins.check()


def test_a_conflict_names_the_block_its_group_and_its_holder() -> None:
    pins = table()
    pins.add("t-9", PinKind.TARGET, (ids(), ids(2)), 0.0)
    with pytest.raises(PreconditionFailed, match="block 2 of group 1 is pinned by target t-9"):
        pins.check_free_for(PinKind.LEASE, (ids(5), ids(1, 2)))


def test_blocks_can_be_had_back_while_soft_pins_alone_hold_them() -> None:
    pins = PinTable((8,))
    pins.add("soft", PinKind.LEASE, (ids(0, 1, 2),), 0.0)
    pins.soften("soft", PinKind.LEASE)
    assert pins.reclaimable(0) == 3
    pins.add("hard", PinKind.ACCESS, (ids(1, 2, 3),), 0.0)
    assert pins.reclaimable(0) == 1
    pins.check()
    pins.drop("hard", PinKind.ACCESS)
    assert pins.reclaimable(0) == 3
    pins.check()
    pins.add("too", PinKind.LEASE, (ids(2, 4),), 0.0)
    pins.soften("too", PinKind.LEASE)
    assert pins.reclaimable(0) == 4
    pins.harden("soft", PinKind.LEASE)
    assert pins.reclaimable(0) == 1
    pins.check()
    pins.drop("soft", PinKind.LEASE)
    assert pins.reclaimable(0) == 2
    pins.check()


def test_the_same_block_of_another_group_is_another_block() -> None:
    pins = table()
    pins.add("a", PinKind.TARGET, (ids(1), ids()), 0.0)
    pins.add("b", PinKind.TARGET, (ids(), ids(1)), 0.0)
    assert pins.pinned_mask(0).tolist() == [False, True] + [False] * 6
    assert pins.pinned_mask(1).tolist() == [False, True, False, False]


def test_dropping_what_is_not_there_changes_nothing() -> None:
    pins = table()
    pins.add("a", PinKind.LEASE, (ids(1), ids()), 0.0)
    assert pins.drop("a", PinKind.ACCESS) == ()
    assert pins.drop("b", PinKind.LEASE) == ()
    assert [block.tolist() for block in pins.drop("a", PinKind.LEASE)] == [[1], []]
    assert len(pins) == 0


def test_an_owner_has_one_pin_of_a_kind() -> None:
    pins = table()
    pins.add("a", PinKind.LEASE, (ids(1), ids()), 0.0)
    with pytest.raises(AssertionError):
        pins.add("a", PinKind.LEASE, (ids(2), ids()), 0.0)
    pins.check()


def test_a_target_becomes_a_quarantine_without_being_free_in_between() -> None:
    pins = table()
    pins.add("t", PinKind.TARGET, (ids(1, 2), ids()), 1.0)
    pins.quarantine("t", 5.0)
    assert not pins.has("t", PinKind.TARGET)
    assert pins.has("t", PinKind.QUARANTINE)
    assert pins.unpinned(0, ids(1, 2)).tolist() == []
    (pin,) = pins
    assert pin.since == 5.0
    assert pins.quarantined == [2, 0]
    pins.check()
    pins.drop("t", PinKind.QUARANTINE)
    assert pins.quarantined == [0, 0]
    assert pins.unpinned(0, ids(1, 2)).tolist() == [1, 2]


def test_people_can_ask_who_pins_a_block_and_how_many_are_pinned() -> None:
    pins = table()
    pins.add("t", PinKind.TARGET, (ids(5), ids(0)), 0.5)
    pins.add("older", PinKind.LEASE, (ids(2, 3), ids()), 1.0)
    pins.add("younger", PinKind.LEASE, (ids(1, 2), ids()), 2.0)
    assert [pin.owner for pin in pins.of_block(0, 2)] == ["older", "younger"]
    assert pins.of_block(0, 7) == []
    assert [pin.owner for pin in pins] == ["t", "older", "younger"]
    assert pins.count_blocks(0, PinKind.LEASE) == 3
    assert pins.count_blocks(1, PinKind.TARGET) == 1
    assert pins.count_blocks(0, PinKind.QUARANTINE) == 0


@pytest.mark.parametrize("counts", ["_shared", "_exclusive"])
def test_a_count_that_no_pin_explains_is_found(counts: str) -> None:
    pins = table()
    pins.add("a", PinKind.LEASE, (ids(1), ids()), 0.0)
    pins.add("b", PinKind.TARGET, (ids(2), ids()), 0.0)
    pins.check()
    getattr(pins, counts)[1][3] = True
    with pytest.raises(AssertionError):
        pins.check()


def test_a_read_pin_beside_a_target_is_found() -> None:
    pins = table()
    pins.add("t", PinKind.TARGET, (ids(2), ids()), 0.0)
    pins._pins["l", PinKind.LEASE] = Pin("l", PinKind.LEASE, (ids(2), ids()), 0.0)
    pins._shared[0][2] = 1
    with pytest.raises(AssertionError):
        pins.check()


def test_only_a_target_becomes_a_quarantine() -> None:
    pins = table()
    pins.add("a", PinKind.LEASE, (ids(1), ids()), 0.0)
    with pytest.raises(KeyError):
        pins.quarantine("a", 1.0)
    pins.check()


Row = tuple[int, int]
"""A group and a block."""


class Pins(RuleBasedStateMachine):
    """Owners pin, drop and quarantine blocks at random, compared with sets of blocks."""

    SIZES = (6, 3)
    ROWS = tuple((group, block) for group, size in enumerate(SIZES) for block in range(size))

    def __init__(self) -> None:
        super().__init__()
        self.pins = PinTable(self.SIZES)
        self.model: dict[tuple[str, PinKind], set[Row]] = {}
        self.soft: set[tuple[str, PinKind]] = set()
        self.now = 0.0

    @rule(
        owner=st.sampled_from("abcd"),
        kind=st.sampled_from(PinKind),
        rows=st.sets(st.sampled_from(ROWS), max_size=4),
    )
    def add(self, owner: str, kind: PinKind, rows: set[Row]) -> None:
        if (owner, kind) in self.model:
            return
        self.now += 1
        blocks = tuple(ids(*sorted(b for g, b in rows if g == group)) for group in (0, 1))
        conflict = any(held & rows and EXCLUSIVE & {kind, other} for (_, other), held in self.model.items())
        if conflict:
            with refused(Reason.BLOCK_PINNED, PreconditionFailed):
                self.pins.check_free_for(kind, blocks)
            with refused(Reason.BLOCK_PINNED, PreconditionFailed):
                self.pins.add(owner, kind, blocks, self.now)
        else:
            self.pins.check_free_for(kind, blocks)
            self.pins.add(owner, kind, blocks, self.now)
            self.model[owner, kind] = rows

    @rule(owner=st.sampled_from("abcd"), kind=st.sampled_from(PinKind))
    def drop(self, owner: str, kind: PinKind) -> None:
        dropped = self.pins.drop(owner, kind)
        assert bool(dropped) == ((owner, kind) in self.model)
        rows = {(group, block) for group, blocks in enumerate(dropped) for block in blocks.tolist()}
        assert rows == self.model.pop((owner, kind), set())
        self.soft.discard((owner, kind))

    @rule(owner=st.sampled_from("abcd"), soft=st.booleans())
    def soften(self, owner: str, soft: bool) -> None:
        name = (owner, PinKind.LEASE)
        if soft:
            self.pins.soften(*name)
            self.soft |= {name} & self.model.keys()
        else:
            self.pins.harden(*name)
            self.soft.discard(name)

    @rule(owner=st.sampled_from("abcd"))
    def quarantine(self, owner: str) -> None:
        if (owner, PinKind.TARGET) not in self.model or (owner, PinKind.QUARANTINE) in self.model:
            return
        self.now += 1
        self.pins.quarantine(owner, self.now)
        self.model[owner, PinKind.QUARANTINE] = self.model.pop((owner, PinKind.TARGET))

    @invariant()
    def a_block_is_free_when_nothing_pins_it(self) -> None:
        pinned = set().union(*self.model.values())
        for group, size in enumerate(self.SIZES):
            mask = [(group, block) in pinned for block in range(size)]
            assert self.pins.pinned_mask(group).tolist() == mask
            free = [block for block in range(size) if not mask[block]]
            assert self.pins.unpinned(group, ids(*range(size))).tolist() == free

    @invariant()
    def a_block_is_soft_when_only_soft_pins_hold_it(self) -> None:
        soft = set().union(*(self.model[name] for name in self.soft))
        hard = set().union(*(rows for name, rows in self.model.items() if name not in self.soft))
        for group, size in enumerate(self.SIZES):
            assert (self.pins.soft[group], self.pins.soft_given[group]) == (
                sum((group, block) in soft - hard for block in range(size)),
                0,
            )

    @invariant()
    def the_pins_are_those_that_were_made(self) -> None:
        self.pins.check()
        assert len(self.pins) == len(self.model)
        assert {(pin.owner, pin.kind) for pin in self.pins} == set(self.model)
        since = [pin.since for pin in self.pins]
        assert since == sorted(since)
        for owner in "abcd":
            assert [self.pins.has(owner, kind) for kind in PinKind] == [(owner, k) in self.model for k in PinKind]

    @invariant()
    def every_block_knows_who_pins_it(self) -> None:
        for group, block in self.ROWS:
            holders = {(pin.owner, pin.kind) for pin in self.pins.of_block(group, block)}
            assert holders == {holder for holder, rows in self.model.items() if (group, block) in rows}

    @invariant()
    def blocks_are_counted_once_for_each_kind(self) -> None:
        for kind in PinKind:
            rows: set[Row] = set().union(*(rows for (_, other), rows in self.model.items() if other is kind))
            for group in range(len(self.SIZES)):
                assert self.pins.count_blocks(group, kind) == sum(g == group for g, _ in rows)


TestPins = Pins.TestCase
TestPins.settings = settings(stateful_step_count=25)
