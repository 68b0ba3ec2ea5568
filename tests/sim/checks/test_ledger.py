"""The ledger of one lead: it finds every event or answer that breaks a rule."""

from collections.abc import Callable
from typing import Any

import pytest

from kvgrpc.core.actions import BlocksReturnedNews, Expect, FailedNews
from kvgrpc.core.events import ChecksumBlocks, ConnectPeer, Event, OpenAccess, PullBlocks
from kvgrpc.core.tables.transfers import Direction, Disposition, Failure, State, Transfer
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.owners import ENGINE
from kvgrpc.errors import Reason
from sim.checks.accounts import LeadAccounts
from sim.rules import Rule, Violated


def transfer(**changes: Any) -> Transfer:
    fields: dict[str, Any] = {
        "id": "t",
        "direction": Direction.SEND,
        "created": 0.0,
        "key": b"k",
        "owner": "e",
        **changes,
    }
    return Transfer(**fields)


OVER = {"state": State.SUCCEEDED, "memory": Disposition.RETURNED, "ended": 5.0, "seq": 2}
FAILURE = Failure(Reason.CANCELLED, "")


@pytest.mark.parametrize(
    "second",
    [
        {**OVER, "seq": 0},
        {**OVER, "ended": None},
        {**OVER, "ended": 6.0},
        {**OVER, "ended": 601.0},
        {**OVER, "failure": FAILURE},
        {**OVER, "state": State.FAILED},
    ],
    ids=["its number falls", "no end", "an end to come", "too late", "success with a failure", "failure without one"],
)
def test_a_wrong_end_is_found(second: dict[str, Any]) -> None:
    ledger = LeadAccounts(Limits(lease_cap_s=600.0))
    ledger.changed(transfer(seq=1), 0.0)
    with pytest.raises(AssertionError):
        ledger.changed(transfer(**second), 601.0 if second["ended"] == 601.0 else 5.0)


def test_an_end_is_for_ever() -> None:
    ledger = LeadAccounts(Limits(lease_cap_s=600.0))
    ledger.changed(transfer(seq=1), 0.0)
    ledger.changed(transfer(**OVER), 5.0)
    for change in ({"state": State.FAILED}, {"memory": Disposition.QUARANTINED}, {"ended": 4.0}, {"failure": FAILURE}):
        with pytest.raises(AssertionError):
            ledger.changed(transfer(**{**OVER, "seq": 3, **change}), 5.0)
    assert ledger.ends == {(Direction.SEND, State.SUCCEEDED): 1}


def test_a_call_is_answered_once() -> None:
    ledger = LeadAccounts(Limits(lease_cap_s=600.0))
    given: list[object] = []
    number = ledger.called(given.append)
    with pytest.raises(AssertionError, match="never answered"):
        ledger.check_idle()
    ledger.answered(number, answer := _answer())
    assert given == [answer]
    with pytest.raises(AssertionError, match="twice"):
        ledger.answered(number, answer)
    ledger.check_idle()


def _answer() -> Any:
    return object()


@pytest.mark.parametrize(
    ("kind", "wait_s"),
    [
        (PullBlocks, 0.0), (OpenAccess, Limits().open_wait_s), (ConnectPeer, Limits().connect_timeout_s),
        (ChecksumBlocks, Limits().transfer_timeout_s),
    ],
)  # fmt: skip
def test_a_call_that_is_not_answered_in_its_time_is_found(kind: type[Event], wait_s: float) -> None:
    ledger = LeadAccounts(Limits(lease_cap_s=600.0))
    ledger.waits(ledger.called(lambda _: None), kind, 100.0)
    ledger.check_waits(100.0 + wait_s)
    with pytest.raises(Violated, match="not answered") as found:
        ledger.check_waits(101.0 + wait_s)
    assert found.value.rule is Rule.R7


def test_a_transfer_that_does_not_end_is_found() -> None:
    ledger = LeadAccounts(Limits(lease_cap_s=600.0))
    ledger.changed(transfer(seq=1), 0.0)
    ledger.check_waits(600.0)
    with pytest.raises(Violated, match="has not ended"):
        ledger.check_waits(601.0)


def test_an_engine_is_told_of_every_end_and_return_once() -> None:
    ledger = LeadAccounts(Limits(lease_cap_s=600.0))
    owned = {"owner": ENGINE, "direction": Direction.SEND}
    ledger.changed(transfer(**owned, seq=1), 0.0, attached=True)
    ledger.check_told()
    failed = {**OVER, **owned, "state": State.FAILED, "failure": FAILURE}
    ledger.changed(transfer(**failed), 5.0, attached=True)
    with pytest.raises(Violated, match="not told of the return"):
        ledger.check_told()
    with pytest.raises(Violated, match="not before of its end"):
        ledger.told(BlocksReturnedNews("t", "r", "l"))
    ledger.told(FailedNews("t", "r", FAILURE, cancelled=False))
    with pytest.raises(Violated, match="not told of the return"):
        ledger.check_told()
    ledger.told(BlocksReturnedNews("t", "r", "l"))
    ledger.check_told()
    with pytest.raises(Violated, match="told before"):
        ledger.told(FailedNews("t", "r", FAILURE, cancelled=False))


@pytest.mark.parametrize("ends", [LeadAccounts.check_idle, LeadAccounts.life_began])
def test_what_is_left_over_is_found(ends: Callable[[LeadAccounts], None]) -> None:
    ledger = LeadAccounts(Limits(lease_cap_s=600.0))
    ledger.changed(transfer(seq=1), 0.0)
    with pytest.raises(AssertionError):
        ends(ledger)
    ledger.crashed()
    ends(ledger)
    ledger.expected(Expect("a", open=True))
    with pytest.raises(AssertionError, match="expected"):
        ends(ledger)
    with pytest.raises(AssertionError, match="twice"):
        ledger.expected(Expect("a", open=True))
    ledger.expected(Expect("a", open=False))
    with pytest.raises(AssertionError, match="twice"):
        ledger.expected(Expect("a", open=False))
    ends(ledger)
