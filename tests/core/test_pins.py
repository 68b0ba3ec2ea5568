"""Pins: a block is reusable when it has none; reads share, a target is alone, and quarantine is never free in between."""

from collections.abc import Iterator

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvgrpc.core.pins import EXCLUSIVE, PinKind, PinTable
from kvgrpc.errors import PreconditionFailed, Reason
from tests.core.nodes import ids, refused

SHARED = [kind for kind in PinKind if kind not in EXCLUSIVE]


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
    pins.check()
    pins.drop("t", PinKind.QUARANTINE)
    assert pins.unpinned(0, ids(1, 2)).tolist() == [1, 2]


def test_people_can_ask_who_pins_a_block_and_how_many_are_pinned() -> None:
    pins = table()
    pins.add("younger", PinKind.LEASE, (ids(1, 2), ids()), 2.0)
    pins.add("older", PinKind.LEASE, (ids(2, 3), ids()), 1.0)
    pins.add("t", PinKind.TARGET, (ids(5), ids(0)), 0.5)
    assert [pin.owner for pin in pins.of_block(0, 2)] == ["older", "younger"]
    assert pins.of_block(0, 7) == []
    assert [pin.owner for pin in pins] == ["t", "older", "younger"]
    assert pins.count_blocks(0, PinKind.LEASE) == 3
    assert pins.count_blocks(1, PinKind.TARGET) == 1
    assert pins.count_blocks(0, PinKind.QUARANTINE) == 0


class Pins(RuleBasedStateMachine):
    """Owners pin, drop and quarantine; a plain dictionary says what must be so."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[tuple[str, PinKind], set[int]] = {}

    @initialize()
    def start(self) -> None:
        self.pins = PinTable((6,))

    @rule(owner=st.sampled_from("abcd"), kind=st.sampled_from(PinKind), blocks=st.sets(st.integers(0, 5), max_size=3))
    def add(self, owner: str, kind: PinKind, blocks: set[int]) -> None:
        if (owner, kind) in self.model:
            return
        conflict = any(
            held & blocks and (kind in EXCLUSIVE or other in EXCLUSIVE) for (_, other), held in self.model.items()
        )
        if conflict:
            with refused(Reason.BLOCK_PINNED):
                self.pins.add(owner, kind, (ids(*sorted(blocks)),), 0.0)
        else:
            self.pins.add(owner, kind, (ids(*sorted(blocks)),), 0.0)
            self.model[owner, kind] = blocks

    @rule(owner=st.sampled_from("abcd"), kind=st.sampled_from(PinKind))
    def drop(self, owner: str, kind: PinKind) -> None:
        dropped = self.pins.drop(owner, kind)
        expected = self.model.pop((owner, kind), None)
        assert (dropped == ()) == (expected is None)

    def targets(self) -> Iterator[str]:
        return (owner for owner, kind in self.model if kind is PinKind.TARGET)

    @precondition(lambda self: any((o, PinKind.QUARANTINE) not in self.model for o in self.targets()))
    @rule()
    def quarantine(self) -> None:
        owner = next(o for o in self.targets() if (o, PinKind.QUARANTINE) not in self.model)
        self.pins.quarantine(owner, 0.0)
        self.model[owner, PinKind.QUARANTINE] = self.model.pop((owner, PinKind.TARGET))

    @invariant()
    def a_block_is_free_when_nothing_pins_it(self) -> None:
        if not hasattr(self, "pins"):
            return
        self.pins.check()
        held = set().union(*self.model.values()) if self.model else set()
        assert set(self.pins.unpinned(0, ids(*range(6))).tolist()) == set(range(6)) - held
        assert {(pin.owner, pin.kind) for pin in self.pins} == set(self.model)


TestPins = Pins.TestCase
