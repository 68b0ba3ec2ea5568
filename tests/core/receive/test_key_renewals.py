"""Requests that wait for blocks at their destination: the lead renews their KV at the source, by transfer key."""

import math
from dataclasses import replace
from typing import Any

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.events import Call, LeaseRef, PushSource, ReclaimBlocks, RenewLeases
from kvgrpc.core.node import Node
from kvgrpc.core.tables.transfers import State, Transfer
from kvgrpc.core.values.request_times import RequestTime
from kvgrpc.errors import Exhausted, InvalidRequest, OutOfRange, Reason, Unavailable
from tests.core.nodes import KEY, Lead, describe, key_of
from tests.core.pairs import MODES, Pair, Writers

OTHER = b"k" * 16


def say(pair: Pair, *keys: bytes, **fields: Any) -> Any:
    """Renews these keys as the destination's engine, whose requests wait."""
    source = PushSource(pair.p.me.address)
    refs = tuple(LeaseRef(key=key) for key in keys or (KEY,))
    return pair.call(pair.d, lambda c: RenewLeases(c, refs, source=source, **fields))


def renew(pair: Pair, key: bytes = KEY, **fields: Any) -> Any:
    """Renews a key at the source as a peer, and returns the row of the answer."""
    return pair.call(pair.p, lambda c: RenewLeases(c, (LeaseRef(key=key),), **fields), "peer").rows[0]


def at_source(pair: Pair) -> Transfer:
    return pair.p.transfer(next(iter(pair.p.state.transfers)).id)


def asked(pair: Pair) -> list[actions.SendRenewKeys]:
    """Returns the renewals that the destination's lead sent to the source."""
    return [action for action in pair.sent if isinstance(action, actions.SendRenewKeys)]


def expected(pair: Pair) -> None:
    """Tells the source's lead that its engine expects the request."""
    pair.call(pair.p, lambda c: events.FinishedBlocks(c, KEY, (), None, expected=True))


def every(pair: Pair, step_s: float, for_s: float) -> None:
    """Repeats the engine's renewal at the destination every `step_s` seconds, for `for_s` seconds."""
    for _ in range(round(for_s / step_s)):
        pair.tick(step_s)
        say(pair)


@MODES
def test_what_was_pushed_waits_for_as_long_as_its_request_waits_for_blocks(writers: Writers) -> None:
    pair = Pair(writers, lease_cap_s=1_000.0)
    pair.finish(32)
    every(pair, 20.0, 900.0)
    assert not at_source(pair).over
    pair.register(pair.reserve(32).token)
    pair.moved()
    assert [transfer.state for transfer in pair.both()] == [State.SUCCEEDED, State.SUCCEEDED]


def test_what_was_handed_over_both_ways_waits_as_well() -> None:
    pair = Pair()
    pair.finish(32, waits_for=events.WaitsFor.READERS, takes_registrations=True)
    every(pair, 10.0, 200.0)
    assert not at_source(pair).over


def test_what_nobody_renews_any_more_ends_with_its_time() -> None:
    pair = Pair()
    pair.finish(32)
    every(pair, 20.0, 200.0)
    assert not at_source(pair).over
    pair.tick(120.0)
    assert at_source(pair).over


def test_renewals_end_at_the_cap() -> None:
    pair = Pair(lease_cap_s=300.0)
    pair.finish(32)
    every(pair, 20.0, 280.0)
    assert not at_source(pair).over
    every(pair, 20.0, 20.0)
    assert at_source(pair).over


def test_a_renewed_push_is_firm_but_yields_to_an_older_request() -> None:
    pair = Pair()
    made = pair.finish(32, (0, 1), call={"wall_us": 1_000}, request_time_us=900)

    def reclaim(time_us: int) -> Any:
        by = RequestTime(time_us, "x")
        return pair.call(pair.p, lambda c: ReclaimBlocks(c, ((0, 1),), by=by), wall_us=1_000)

    say(pair)
    pair.tick(10.0)
    say(pair)
    pair.tick(10.0)
    assert not reclaim(950).enough
    answer = reclaim(800)
    assert [row.lease_id for row in answer.leases] == [made.lease.id]
    assert at_source(pair).over


@MODES
def test_a_destination_waits_for_a_prefill_that_its_engine_expects(writers: Writers) -> None:
    pair = Pair(writers, lease_cap_s=1_000.0)
    pair.p.state.life.expects_pushes = True
    pair.reserve(32, source=PushSource(pair.p.me.address))
    expected(pair)
    every(pair, 20.0, 600.0)
    assert [transfer.over for transfer in pair.both()] == [False, False]
    pair.finish(32)
    pair.moved()
    assert [transfer.state for transfer in pair.both()] == [State.SUCCEEDED, State.SUCCEEDED]


def test_a_destination_does_not_wait_longer_for_what_no_engine_expects() -> None:
    pair = Pair()
    pair.reserve(32, source=PushSource(pair.p.me.address))
    every(pair, 20.0, 120.0)
    assert pair.reasons() == [Reason.REGISTRATION_TIMEOUT, Reason.REGISTRATION_TIMEOUT]


def test_a_push_that_starts_over_is_waited_for() -> None:
    pair = Pair()
    pair.reserve(32, source=PushSource(pair.p.me.address))
    lease = pair.finish(32, last=False).lease
    pair.feed(pair.p, events.LeasesVoided((lease.id,)))
    pair.moved()
    every(pair, 20.0, 300.0)
    assert [transfer.over for transfer in pair.both()] == [False, False]


def test_a_key_that_is_not_known_or_is_over_is_a_row_that_says_so() -> None:
    pair = Pair()
    assert renew(pair) == (0.0, Reason.LEASE_NOT_FOUND, None)
    made = pair.finish(32)
    assert renew(pair)[1] is None
    pair.call(pair.p, lambda c: events.ReleaseLease(c, LeaseRef(made.lease.id)))
    assert renew(pair)[1] is Reason.LEASE_RELEASED


def test_of_several_hand_overs_of_a_key_the_one_that_lives_is_renewed() -> None:
    pair = Pair()
    first = pair.finish(32, waits_for=events.WaitsFor.READERS)
    pair.call(pair.p, lambda c: events.ReleaseLease(c, LeaseRef(first.lease.id)))
    pair.finish(32, waits_for=events.WaitsFor.READERS)
    assert renew(pair)[1] is None


def test_to_ask_changes_nothing() -> None:
    pair = Pair()
    pair.register(pair.reserve(32).token)
    expected(pair)
    pair.tick(20.0)
    assert renew(pair, validate_only=True)[0] == renew(pair, validate_only=True)[0] == 100.0
    assert renew(pair)[0] == 120.0
    say(pair, validate_only=True)
    assert not asked(pair)


def test_a_batch_is_one_call_and_its_answer_has_no_rows() -> None:
    pair = Pair()
    assert say(pair, KEY, OTHER, ttl_s=7.0).rows == ()
    assert asked(pair) == [actions.SendRenewKeys(key_of(pair.p.me), (KEY, OTHER), 7.0, "")]
    assert say(pair).rows == ()


def test_a_source_that_is_not_connected_is_reached_and_asked_the_next_time() -> None:
    pair = Pair()
    source = PushSource("far:1")
    pair.d.call(lambda c: RenewLeases(c, (LeaseRef(key=KEY),), source=source))
    assert not pair.d.seen(actions.SendRenewKeys)
    assert "far:1" in pair.d.state.peers.dials


def test_what_a_caller_has_renewed_elsewhere_is_bounded() -> None:
    """No caller waits for the peer's answer, so no other limit applies to the calls in flight."""
    pair = Pair(dials_per_connection=2)
    source, keys = PushSource(pair.p.me.address), tuple(LeaseRef(key=bytes([i]) * 16) for i in range(65))

    def made(call: Call) -> RenewLeases:
        return RenewLeases(replace(call, connection="router"), keys, source=source)

    pair.call(pair.d, made)
    with pytest.raises(Exhausted, match="2 renewals of 64 keys at other engines"):
        pair.call(pair.d, made)
    assert len(asked(pair)) == 1
    say(pair)
    assert len(asked(pair)) == 2, "what the engine asks for is not bounded by what callers do"
    pair.tick(10.0)
    pair.call(pair.d, made)
    assert len(asked(pair)) == 3


def test_renewals_elsewhere_take_no_room_of_handshakes_but_a_handshake_that_one_needs_does() -> None:
    pair = Pair(dials_per_connection=1)

    def made(call: Call, address: str) -> RenewLeases:
        return RenewLeases(replace(call, connection="router"), (LeaseRef(key=KEY),), source=PushSource(address))

    pair.call(pair.d, lambda c: made(c, pair.p.me.address))
    pair.d.ask(lambda c: events.ConnectPeer(c, "new:1", ""), connection="router")
    assert "new:1" in pair.d.state.peers.dials
    pair.tick(10.0)
    pair.d.call(lambda c: made(c, "far:1"))
    with pytest.raises(Exhausted, match="1 handshakes with other engines"):
        pair.d.call(lambda c: made(c, "farther:1"))
    assert set(pair.d.state.peers.dials) == {"far:1"}


def test_a_lead_without_a_pool_reaches_no_source() -> None:
    lead = Lead(describe("d", 2))
    lead.node = Node()
    for _ in range(2):
        with pytest.raises(Unavailable):
            lead.call(lambda c: RenewLeases(c, (LeaseRef(key=KEY),), source=PushSource("p:1")))
    assert not lead.state.peers.dials


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, math.nan])
def test_a_ttl_of_no_time_is_refused_where_it_is_said(ttl_s: float) -> None:
    pair = Pair()
    with pytest.raises(InvalidRequest):
        say(pair, ttl_s=ttl_s)
    assert not asked(pair)


@pytest.mark.parametrize(("refs", "kind"), [
    ((LeaseRef("l-1"),), InvalidRequest), ((LeaseRef(key=b"short"),), InvalidRequest),
    ((LeaseRef(key=KEY), LeaseRef(key=KEY), LeaseRef(key=KEY)), OutOfRange),
])  # fmt: skip
def test_what_names_no_keys_or_too_many_is_refused(refs: tuple[LeaseRef, ...], kind: type[Exception]) -> None:
    pair = Pair(renewals_per_call=2)
    with pytest.raises(kind):
        pair.call(pair.d, lambda c: RenewLeases(c, refs, source=PushSource(pair.p.me.address)))
    assert not asked(pair)


@pytest.mark.parametrize("left_s", [math.inf, math.nan, -5.0, 1e12])
def test_no_source_makes_a_destination_wait_beyond_its_cap_or_shorter(left_s: float) -> None:
    pair = Pair(lease_cap_s=200.0)
    pair.reserve(32, source=PushSource(pair.p.me.address))
    pair.d.feed(events.KeysRenewed(key_of(pair.p.me), ((KEY, left_s),)))
    pair.d.tick(119.0)
    assert not pair.d.transfer(pair.both()[1].id).over
    pair.d.tick(81.0)
    assert pair.d.transfer(pair.both()[1].id).over


def test_only_the_source_of_a_push_says_how_long_it_is_waited_for() -> None:
    pair = Pair()
    pair.reserve(32, source=PushSource(pair.p.me.address))
    pair.d.feed(events.KeysRenewed(key_of(pair.e.me), ((KEY, 500.0), (OTHER, 500.0))))
    pair.d.tick(120.0)
    assert pair.d.transfer(pair.both()[1].id).over
