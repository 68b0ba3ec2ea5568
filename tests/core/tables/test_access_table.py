"""Accesses at the issuer: which state may follow which, and what each state says of a peer's reads."""

import pytest

from kvgrpc.core.tables.accesses import STATES, Access, AccessOpening, AccessState, CloseOutcome, pin_owner
from tests.core.nodes import check_table


def access(state: AccessState = AccessState.WAITING) -> Access:
    return Access(AccessOpening(b"\x0a" * 16, b"token", None), "d", "d@1", "l-1", since=1.0, state=state)


def test_every_move_of_the_table_happens_and_no_other() -> None:
    def move(before: AccessState, after: AccessState) -> AccessState:
        made = access(before)
        made.move(after)
        return made.state

    check_table(STATES, move)


@pytest.mark.parametrize("state", AccessState)
def test_a_refused_move_changes_nothing(state: AccessState) -> None:
    for after in set(AccessState) - STATES[state]:
        made = access(state)
        with pytest.raises(AssertionError):
            made.move(after)
        assert made.state is state


def test_a_closed_access_stays_closed_and_no_state_is_entered_twice() -> None:
    assert STATES[AccessState.CLOSED] == frozenset()
    seen: set[AccessState] = set()
    rows = [AccessState.WAITING]
    while rows:
        state = rows.pop()
        assert state not in STATES[state]
        seen.add(state)
        rows += STATES[state] - seen
    assert seen == set(AccessState)


def test_the_peer_may_have_read_in_exactly_the_held_states() -> None:
    assert {state for state in AccessState if access(state).held} == {AccessState.OPEN, AccessState.STALE}


def test_an_access_is_named_by_its_id() -> None:
    made = access()
    assert made.id == made.opening.access_id
    assert made.owner == pin_owner(made.id) == "a-" + "0a" * 16


def test_a_new_access_has_promised_nothing() -> None:
    made = access()
    assert (made.state, made.held, made.stale, made.verdict, made.outcome) == (
        AccessState.WAITING,
        False,
        None,
        None,
        CloseOutcome.FAILED,
    )
