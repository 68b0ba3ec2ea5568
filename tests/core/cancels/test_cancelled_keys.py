"""A cancelled key refuses calls that may still be on their way, and never a retry after its transfers have ended."""

from typing import Any

import pytest

from kvgrpc.core import events
from kvgrpc.core.events import CancelScope, Destination, PushSource, WaitsFor
from kvgrpc.core.tables.remembered import digest_of
from kvgrpc.core.tables.transfers import Direction, State
from kvgrpc.core.values.grants import AccessKind
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.owners import ENGINE, SCHEDULER, of_tenant
from kvgrpc.errors import InvalidRequest, Reason
from tests.core.cancels.pulled import THIS_SIDE, at_stage, cancel, hand_over, newest, pull, states
from tests.core.nodes import KEY, Lead, access_id, content, describe, grant, lists, refused, snapshot
from tests.core.pairs import MODES, Pair, Writers

D = describe("d", 2)


@pytest.fixture
def lead() -> Lead:
    return Lead(describe("p", 1))


def ask(lead: Lead, **fields: Any) -> Any:
    return lead.call(lambda c: events.CancelTransfer(c, **fields), "router")


def works(lead: Lead, name: str) -> Any:
    """Makes the call `name` under a key."""
    match name:
        case "hand over":
            return lead.finish()
        case "part":
            return lead.finish(waits_for=WaitsFor.REGISTRATION)
        case "register":
            token = grant(D, access=AccessKind.WRITE)
            return lead.call(lambda c: events.RegisterPush(c, token, "", access_id(5), access_id(6)))
        case "reserve":
            return lead.call(lambda c: events.ReserveBlocks(c, KEY, lists((3, 4)), content(32)))
    where = Destination(lists((3, 4)))
    return lead.call(lambda c: events.PullBlocks(c, grant(D), content(32), access_id(7), destination=where))


NAMES = ("hand over", "part", "register", "reserve", "pull")


@pytest.mark.parametrize("scope", CancelScope)
@pytest.mark.parametrize("name", NAMES)
def test_what_comes_under_an_unknown_key_that_was_cancelled_is_refused_for_a_while(
    lead: Lead, name: str, scope: CancelScope
) -> None:
    assert ask(lead, key=KEY, scope=scope).outcome == "tombstoned"
    before = snapshot(lead.node)
    with refused(Reason.CANCELLED):
        works(lead, name)
    assert snapshot(lead.node) == before
    lead.tick(120.0)
    works(lead, name)


def test_a_key_that_a_tenant_cancelled_is_not_refused_to_another(lead: Lead) -> None:
    red, blue = of_tenant("red", "router"), of_tenant("blue", "router")

    def reserves(principal: str) -> Any:
        return lead.call(lambda c: events.ReserveBlocks(c, KEY, lists((3, 4)), content(32)), principal)

    def cancels(principal: str) -> None:
        lead.call(lambda c: events.CancelTransfer(c, key=KEY), principal)

    cancels(blue)
    for principal in (blue, ENGINE):
        with refused(Reason.CANCELLED):
            reserves(principal)
    lead.state.tombstones.check_key(KEY, tenant="red")
    cancels(red)  # lifts no earlier cancel
    for principal in (blue, red):
        with refused(Reason.CANCELLED):
            reserves(principal)


@pytest.mark.parametrize("principal", [ENGINE, SCHEDULER])
@pytest.mark.parametrize("name", NAMES)
def test_a_key_whose_transfers_are_over_may_be_tried_again(lead: Lead, name: str, principal: str) -> None:
    made = lead.finish(ttl_s=1.0, principal=principal)
    lead.tick(1.0)
    answer = ask(lead, key=KEY)
    assert (answer.outcome, [t.id for t in answer.transfers]) == ("already_ended", [made.transfer.id])
    assert not lead.state.tombstones.keys
    works(lead, name)


def test_only_the_latest_of_the_history_are_shown(lead: Lead) -> None:
    for _ in range(70):
        lead.finish(ttl_s=1.0, principal=SCHEDULER)
        lead.tick(1.0)
    assert len(ask(lead, key=KEY).transfers) == 64


def test_a_key_that_the_history_has_forgotten_is_unknown() -> None:
    lead = Lead(describe("p", 1), Limits(transfer_history=1))
    for key in (KEY, b"another key here"):
        lead.finish(key=key, ttl_s=1.0, principal=SCHEDULER)
        lead.tick(1.0)
    assert ask(lead, key=KEY).outcome == "tombstoned"


@pytest.mark.parametrize("at", ["p", "d"])
def test_a_pull_that_was_cancelled_may_be_tried_again_at_once_under_its_key(at: str) -> None:
    pair = at_stage("wire")
    cancel(pair, getattr(pair, at))
    pair.moved()
    pull(pair, hand_over(pair).token, number=9)
    pair.moved()
    assert states(pair) == [State.SUCCEEDED] * 2


@MODES
@pytest.mark.parametrize("at", ["p", "d"])
@pytest.mark.parametrize("parts_first", [True, False])
def test_a_push_whose_halves_had_met_may_be_tried_again_at_once_under_its_key(
    writers: Writers, at: str, parts_first: bool
) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    cancel(pair, getattr(pair, at))
    pair.moved()
    assert states(pair) == [State.CANCELLED] * 2
    if parts_first:
        pair.finish(32, (1, 2))
    pair.register(pair.reserve(32, (3, 4)).token, number=60)
    if not parts_first:
        pair.finish(32, (1, 2))
    pair.moved()
    assert states(pair) == [State.SUCCEEDED] * 2


def test_the_missing_half_of_a_push_that_was_cancelled_at_its_source_is_refused_for_a_while() -> None:
    for half in ("part", "destination"):
        pair = Pair()
        if half == "part":
            pair.register(pair.reserve(32, (3, 4)).token)
        else:
            pair.finish(32, (1, 2))
        cancel(pair, pair.p)
        with refused(Reason.CANCELLED):
            pair.finish(32, (1, 2))
        with refused(Reason.CANCELLED):
            pair.register(pair.reserve(32, (8, 9), at=pair.e).token, number=60)
        assert cancel(pair, pair.p).outcome == "already_ended"
        with refused(Reason.CANCELLED):
            pair.register(pair.reserve(32, (8, 9), key=KEY, at=pair.d).token, number=70)
        pair.tick(120.0)
        pair.finish(32, (1, 2))


def test_parts_of_a_push_that_its_destination_cancelled_are_refused_until_another_one_registers() -> None:
    pair = Pair()
    pair.reserve(32, (3, 4), source=PushSource(pair.p.me.address, "p"))
    cancel(pair, pair.d)
    assert newest(pair.p).state is State.CANCELLED
    with refused(Reason.CANCELLED):
        pair.finish(32, (1, 2))
    pair.reserve(32, (3, 4), source=PushSource(pair.p.me.address, "p"))
    pair.finish(32, (1, 2))
    pair.moved()
    assert states(pair) == [State.SUCCEEDED] * 2


def test_a_hand_over_to_readers_is_no_late_part_of_a_push() -> None:
    pair = Pair()
    pair.reserve(32, (3, 4), source=PushSource(pair.p.me.address, "p"))
    cancel(pair, pair.d)
    pull(pair, hand_over(pair).token)
    pair.moved()
    assert states(pair) == [State.SUCCEEDED] * 2


def test_a_grant_whose_push_is_over_registers_nothing_any_more() -> None:
    for at, reason in (("p", Reason.CANCELLED), ("d", Reason.CANCELLED), ("", Reason.TRANSFER_ENDED)):
        pair = Pair()
        token = pair.reserve(32, (3, 4)).token
        pair.register(token)
        pair.finish(32, (1, 2))
        if at:
            cancel(pair, getattr(pair, at))
        pair.moved()
        assert newest(pair.p).over
        before = len(list(pair.p.state.transfers))
        with refused(reason):
            pair.register(token, number=60)
        assert len(list(pair.p.state.transfers)) == before
        pair.tick(120.0)
        assert not pair.p.state.tombstones.grants
        assert not pair.p.state.tombstones.keys


def test_what_ended_may_be_tried_again_once_its_key_is_cancelled() -> None:
    for end in ("succeeded", "failed", "alone"):
        pair = Pair()
        if end != "failed":
            pair.register(pair.reserve(32, (3, 4)).token)
        pair.finish(32, (1, 2))
        if end == "alone":
            cancel(pair, pair.p, THIS_SIDE)
        pair.moved()
        pair.tick(1.0 if end != "failed" else 120.0)
        assert newest(pair.p).over
        again = pair.reserve(32, (3, 4)).token
        if end != "alone":  # the halves of the push had met
            with refused(Reason.TRANSFER_ENDED):
                pair.register(again, number=60)
        assert cancel(pair, pair.p).outcome == "already_ended"
        pair.register(again, number=62)
        pair.finish(32, (1, 2))
        pair.moved()
        assert states(pair) == [State.SUCCEEDED] * 2


def test_grants_that_are_remembered_are_bounded_and_the_oldest_goes_first() -> None:
    pair = Pair(tombstones=2)
    tokens = []
    for number in range(3):
        tokens.append(pair.reserve(32, (3, 4)).token)
        pair.register(tokens[-1], number=60 + 2 * number)
        pair.finish(32, (1, 2))
        pair.moved()
        cancel(pair, pair.p)
    assert list(pair.p.state.tombstones.grants) == [digest_of(token) for token in tokens[1:]]


# -- the call


@pytest.mark.parametrize("key", [b"short", b"x" * 65])
def test_a_key_of_another_length_is_refused(lead: Lead, key: bytes) -> None:
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        ask(lead, key=key)


@pytest.mark.parametrize("stage", ["opening", "blocks", "wire"])
@pytest.mark.parametrize("at", ["p", "d"])
def test_asking_only_tells_the_outcome_that_a_cancel_would_have(at: str, stage: str) -> None:
    pair = at_stage(stage)
    lead = getattr(pair, at)
    before = snapshot(lead.node)
    found = cancel(pair, lead, validate_only=True)
    assert snapshot(lead.node) == before
    assert cancel(pair, lead).outcome == found.outcome
    assert not found.transfers[0].over


def test_asking_only_leaves_no_tombstone_and_lifts_none(lead: Lead) -> None:
    before = snapshot(lead.node)
    assert ask(lead, key=KEY, validate_only=True).outcome == "tombstoned"
    assert snapshot(lead.node) == before
    lead.finish(waits_for=WaitsFor.REGISTRATION)
    lead.tick(120.0)
    before = snapshot(lead.node)
    assert ask(lead, key=KEY, validate_only=True).outcome == "already_ended"
    assert snapshot(lead.node) == before
    assert [t.direction for t in ask(lead, key=KEY).transfers] == [Direction.SEND]
