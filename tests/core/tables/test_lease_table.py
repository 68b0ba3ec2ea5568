"""Leases: a renewal never shortens one, none lasts past its cap, and each ends once and for ever."""

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvgrpc.core.tables.leases import END_REASON, STATES, LeaseState, LeaseTable, ended_error
from kvgrpc.core.values.limits import granted_ttl
from kvgrpc.errors import InternalError, NotFound, PreconditionFailed, Reason
from tests.core.made_leases import LIMITS, lease
from tests.core.nodes import check_table, content, ids, refused

ENDS = sorted(set(LeaseState) - {LeaseState.LIVE}, key=lambda state: state.value)


def test_every_move_of_the_table_happens_and_no_other() -> None:
    def move(before: LeaseState, after: LeaseState) -> LeaseState:
        made = lease(state=before)
        made.end(after)
        return made.state

    check_table(STATES, move)


@pytest.mark.parametrize("state", ENDS)
def test_an_end_is_for_ever_and_says_why(state: LeaseState) -> None:
    made = lease()
    assert made.live
    made.end(state)
    assert not made.live
    for other in LeaseState:
        with pytest.raises(AssertionError):
            made.end(other)
    assert made.state is state
    error = ended_error(made)
    assert isinstance(error, InternalError if state is LeaseState.LOST else PreconditionFailed)
    assert error.reason is END_REASON[state]
    assert made.id in error.message


def test_a_lease_that_was_cancelled_says_so_to_those_that_come_too_late() -> None:
    made = lease()
    made.cancelled = "the user left"
    made.end(LeaseState.RELEASED)
    error = ended_error(made)
    assert (error.reason, error.message, made.end_reason) == (Reason.CANCELLED, "the user left", Reason.CANCELLED)


def test_a_snapshot_stays_as_the_lease_was() -> None:
    made = lease(blocks=(ids(1, 2),), content=content(48), checksums=(b"1234",))
    made.opened(b"a", "d")
    shown = made.snapshot()
    made.closed(b"a")
    made.finished.add("d")
    made.renew(1.0, 5.0)
    made.end(LeaseState.RELEASED)
    made.forget_blocks()
    assert (shown.state, shown.renewals, shown.done, list(shown.accesses)) == (LeaseState.LIVE, 0, 0, [b"a"])
    assert [list(group) for group in shown.blocks] == [[1, 2]]
    assert (shown.content.tokens, shown.content.digests, shown.checksums) == (48, b"", ()), "these may be large"


def test_every_end_has_a_reason() -> None:
    assert set(END_REASON) == set(ENDS)


def test_a_renewal_without_a_ttl_takes_the_one_of_the_grant() -> None:
    made = lease(ttl_s=20.0)
    made.renew(5.0, 50.0)
    assert (made.deadline, made.last_ttl_s) == (55.0, 50.0)
    made.renew(50.0, None)
    assert (made.deadline, made.last_ttl_s, made.renewals) == (70.0, 20.0, 2)


def test_a_renewal_never_shortens() -> None:
    made = lease(ttl_s=30.0)
    made.renew(1.0, 2.0)
    assert made.deadline == 30.0


def test_a_renewal_never_passes_the_cap() -> None:
    made = lease(ttl_s=30.0)
    for now in (29.0, 59.0, 88.0, 99.0):
        made.renew(now, 30.0)
    assert made.deadline == made.cap == 100.0


def test_only_the_end_is_remembered_of_a_lease_that_is_over() -> None:
    made = lease(blocks=(ids(1, 2), ids(3)))
    made.forget_blocks()
    assert [group.tolist() for group in made.blocks] == [[], []]
    assert made.content.tokens == 32
    assert not made.content.digests


def test_a_consumer_is_done_when_it_finished_and_reads_no_more() -> None:
    made = lease(consumers=2)
    made.opened(b"1", "d")
    made.opened(b"2", "d")
    made.opened(b"3", "e")
    made.finished.add("d")
    assert made.done == 0
    made.closed(b"1")
    assert made.done == 0
    made.closed(b"2")
    assert made.done == 1
    assert made.readers == {"e": 1}
    made.finished |= {"d", "e"}
    assert made.done == 1
    made.closed(b"3")
    assert made.done == 2
    assert made.accesses == {}


def test_closing_an_unknown_access_changes_nothing() -> None:
    made = lease()
    made.opened(b"1", "d")
    made.closed(b"2")
    assert made.accesses == {b"1": "d"}
    assert made.readers == {"d": 1}


def test_accesses_are_kept_in_the_order_of_opening() -> None:
    made = lease()
    for access in (b"z", b"a", b"m"):
        made.opened(access, "d")
    made.closed(b"a")
    assert list(made.accesses) == [b"z", b"m"]


def test_a_table_without_the_lease_says_so() -> None:
    table = LeaseTable(ended_kept=1)
    assert table.find("l-1") is None
    assert not table.known("l-1")
    with refused(Reason.LEASE_NOT_FOUND, NotFound):
        table.get("l-1")


def test_an_ended_lease_can_still_be_asked_until_others_ended_after_it() -> None:
    table = LeaseTable(ended_kept=2)
    made = [lease(f"l-{i}") for i in range(3)]
    for one in made:
        table.add(one)
    for one in made:
        one.end(LeaseState.EXPIRED)
        table.ended(one, 0.0)
    assert [table.known(one.id) for one in made] == [False, True, True]
    assert table.get("l-2") is made[2]
    assert len(table) == 0


class Leases(RuleBasedStateMachine):
    """A lease table compared with a model, on a clock that the rules move."""

    @initialize(kept=st.integers(1, 3))
    def begin(self, kept: int) -> None:
        self.kept = kept
        self.table = LeaseTable(kept)
        self.now = 0.0
        self.made = 0
        self.deadlines: dict[str, float] = {}
        """Live leases by id -> deadline, oldest first."""
        self.caps: dict[str, float] = {}
        self.ended: dict[str, LeaseState] = {}
        """Ended leases by id -> state, in the order of their ends; none is forgotten."""
        self.open: dict[str, dict[bytes, str]] = {}
        self.finished: dict[str, set[str]] = {}

    @rule(asked=st.none() | st.sampled_from([0.5, 10.0, 30.0, 1000.0]))
    def grant(self, asked: float | None) -> None:
        ttl_s = granted_ttl(asked, LIMITS)
        assert 0 < ttl_s <= LIMITS.lease_cap_s
        self.made += 1
        name = f"l-{self.made}"
        self.table.add(lease(name, self.now, ttl_s))
        self.deadlines[name] = self.now + ttl_s
        self.caps[name] = self.now + LIMITS.lease_cap_s
        self.open[name], self.finished[name] = {}, set()

    @rule(seconds=st.sampled_from([0.0, 0.25, 7.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for name in [name for name, deadline in self.deadlines.items() if deadline <= self.now]:
            self.end(name, LeaseState.EXPIRED)

    @precondition(lambda self: self.deadlines)
    @rule(data=st.data(), ttl_s=st.none() | st.sampled_from([0.5, 20.0, 100.0]))
    def renew(self, data: st.DataObject, ttl_s: float | None) -> None:
        name = self.one(data)
        found = self.table.get(name)
        before, renewals = found.deadline, found.renewals
        found.renew(self.now, ttl_s)
        wanted = self.now + (found.ttl_s if ttl_s is None else ttl_s)
        self.deadlines[name] = max(self.deadlines[name], min(wanted, self.caps[name]))
        assert before <= found.deadline <= found.cap
        assert found.renewals == renewals + 1

    @precondition(lambda self: self.deadlines)
    @rule(data=st.data(), consumer=st.sampled_from("de"), number=st.integers(0, 3))
    def open_or_close_an_access(self, data: st.DataObject, consumer: str, number: int) -> None:
        name, access = self.one(data), bytes([number])
        if self.open[name].pop(access, None):
            self.table.get(name).closed(access)
        else:
            self.table.get(name).opened(access, consumer)
            self.open[name][access] = consumer

    @precondition(lambda self: self.deadlines)
    @rule(data=st.data(), consumer=st.sampled_from("de"))
    def finish_a_consumer(self, data: st.DataObject, consumer: str) -> None:
        name = self.one(data)
        self.table.get(name).finished.add(consumer)
        self.finished[name].add(consumer)

    @precondition(lambda self: self.deadlines)
    @rule(data=st.data(), state=st.sampled_from(ENDS))
    def end_one(self, data: st.DataObject, state: LeaseState) -> None:
        self.end(self.one(data), state)

    def one(self, data: st.DataObject) -> str:
        name: str = data.draw(st.sampled_from(sorted(self.deadlines)))
        return name

    def end(self, name: str, state: LeaseState) -> None:
        found = self.table.get(name)
        found.end(state)
        self.table.ended(found, self.now)
        self.ended[name] = state
        del self.deadlines[name]

    @invariant()
    def exactly_those_not_ended_are_live_with_their_deadlines(self) -> None:
        assert {one.id: one.deadline for one in self.table} == self.deadlines
        assert [one.id for one in self.table] == list(self.deadlines)
        assert len(self.table) == len(self.deadlines)
        assert all(one.live and self.now < one.deadline for one in self.table)

    @invariant()
    def the_latest_ends_are_remembered_and_never_change(self) -> None:
        names = list(self.ended)
        for name in names[-self.kept :]:
            assert self.table.known(name)
            assert self.table.get(name).state is self.ended[name]
        for name in names[: -self.kept]:
            assert not self.table.known(name)
            assert self.table.find(name) is None

    @invariant()
    def consumers_are_counted_by_identity(self) -> None:
        for one in self.table:
            readers = set(self.open[one.id].values())
            assert one.done == len(self.finished[one.id] - readers)
            assert one.accesses == self.open[one.id]
            assert set(one.readers) == readers


TestLeases = Leases.TestCase
TestLeases.settings = settings(stateful_step_count=25)
