"""Hand-overs to readers for which a destination registers, and how long a destination waits for expected KV."""

from typing import Any

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.actions import SendClose
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.ledger import RowKind
from kvgrpc.core.tables.transfers import Disposition, State
from kvgrpc.errors import AlreadyExists, PreconditionFailed, Reason
from tests.core.nodes import KEY, access_id, claim, content, refused
from tests.core.pairs import MODES, READING, Pair, Writers


def handed_over(pair: Pair, tokens: int = 40, **fields: Any) -> Any:
    fields = {"waits_for": events.WaitsFor.READERS, "takes_registrations": True, **fields}
    return pair.finish(tokens, (5, 6, 7), **fields)


def expecting(writers: Writers = READING, **limits: Any) -> Pair:
    """Makes a pair whose source's engine expects pushes."""
    pair = Pair(writers, **limits)
    pair.p.state.life.expects_pushes = True
    return pair


@MODES
@pytest.mark.parametrize("first", ["registration", "hand-over"])
def test_a_hand_over_goes_to_who_registers_for_it_whatever_comes_first(writers: Writers, first: str) -> None:
    pair = Pair(writers)
    token = pair.reserve(40, range(10, 13)).token
    if first == "hand-over":
        handed_over(pair)
        pair.register(token)
    else:
        pair.register(token)
        handed_over(pair)
    ((_, post),) = pair.posts
    assert (post.runs.src.tolist(), post.runs.dst.tolist()) == ([40, 552], [80, 592])
    pair.p.node.check()
    pair.moved()
    for transfer in pair.both():
        assert (transfer.state, transfer.memory) == (State.SUCCEEDED, Disposition.RETURNED)
    assert [type(news) for news in pair.told["p"]] == [actions.BlocksReturnedNews]
    assert not len(pair.p.state.pool.pins) + len(pair.d.state.pool.pins)


def test_what_is_kept_of_a_hand_over_stays_in_the_share_of_who_made_it() -> None:
    pair = Pair()
    handed_over(pair, call={"connection": "ipv4:1", "on_behalf_of": "ipv4:1"})
    before = dict(pair.p.state.ledger.by_payer)
    pair.deaf = {actions.SendOpen}
    pair.register(pair.reserve(40, range(10, 13)).token)
    ledger = pair.p.state.ledger
    assert ledger.payer(RowKind.PUSH, pair.both()[0].id) == "ipv4:1"
    assert ledger.by_payer["ipv4:1"] >= before["ipv4:1"]


def test_a_soft_hand_over_is_claimed_by_who_registers_for_it() -> None:
    pair = Pair()
    lease = handed_over(pair).lease
    pair.tick(4.0)
    assert list(pair.p.state.send.soft_leases.oldest())
    pair.deaf = {actions.SendOpen}
    pair.register(pair.reserve(40).token)
    assert not list(pair.p.state.send.soft_leases.oldest())
    assert pair.p.state.send.leases.get(lease.id).pushed
    pair.p.node.check()


def test_what_is_read_by_its_grant_goes_to_nobody_who_registers() -> None:
    pair = Pair()
    token = handed_over(pair).token
    assert isinstance(pair.p.opened(pair.e.me, AccessOpening(access_id(), token, claim(40)))[0], events.Opened)
    with refused(Reason.TRANSFER_EXISTS, AlreadyExists):
        pair.register(pair.reserve(40).token)


def test_a_hand_over_for_readers_alone_takes_no_registration() -> None:
    pair = Pair()
    handed_over(pair, takes_registrations=False)
    with refused(Reason.WAITS_FOR_MISMATCH, PreconditionFailed):
        pair.register(pair.reserve(40).token)


def test_a_hand_over_that_is_pushed_is_read_by_its_grant_no_more() -> None:
    pair = Pair()
    token = handed_over(pair).token
    pair.register(pair.reserve(40).token)
    (error,) = pair.p.opened(pair.e.me, AccessOpening(access_id(), token, claim(40)))
    assert (type(error), error.reason) == (PreconditionFailed, Reason.WAITS_FOR_MISMATCH)


@MODES
@pytest.mark.parametrize("first", ["registration", "hand-over"])
def test_blocks_that_the_engine_takes_back_end_the_push_of_a_hand_over(writers: Writers, first: str) -> None:
    """A hand-over has no further part."""
    pair = Pair(writers)
    token = pair.reserve(40).token
    if first == "registration":
        pair.register(token)
    lease = handed_over(pair).lease
    if first == "hand-over":
        pair.register(token)
    pair.feed(pair.p, events.LeasesVoided((lease.id,)))
    pair.moved(done=False)
    assert all(transfer.over for transfer in pair.both())
    assert [type(news) for news in pair.told["p"]] == [actions.FailedNews, actions.BlocksReturnedNews]
    assert not len(pair.p.state.pool.pins)


def test_a_destination_with_other_contents_gets_nothing_under_the_same_key() -> None:
    pair = Pair()
    handed_over(pair)
    pair.register(pair.reserve(40, content=content(40, first=7)).token)
    assert not pair.posts
    assert pair.reasons()[1] is Reason.CONTENT_MISMATCH


# ---- what an engine says of what is to come


def test_an_engine_that_expects_pushes_is_told_of_what_destinations_wait_for_once() -> None:
    pair = expecting()
    pair.register(pair.reserve(32).token)
    pair.register(pair.reserve(32, at=pair.e).token, number=20)
    assert pair.told["p"] == [actions.PushWantedNews(KEY)]
    for made in (Pair(), expecting()):
        made.finish(32)
        made.register(made.reserve(32).token)
        assert not [news for news in made.told["p"] if isinstance(news, actions.PushWantedNews)]


def test_a_destination_hears_soon_of_what_the_sources_engine_does_not_expect() -> None:
    pair = expecting(announce_wait_s=7.0, registration_timeout_s=20.0)
    pair.register(pair.reserve(32).token)
    pair.tick(6.0)
    assert not any(transfer.over for transfer in pair.both())
    pair.tick(1.0)
    assert all(transfer.over for transfer in pair.both())
    assert not len(pair.d.state.pool.pins)


def test_a_destination_waits_for_what_is_expected() -> None:
    pair = expecting(announce_wait_s=7.0, registration_timeout_s=20.0)
    pair.register(pair.reserve(32).token)
    for checked in (True, False):
        assert pair.finish(32, expected=True, blocks=(), validate_only=checked) == actions.PushExpected()
    pair.tick(19.0)
    assert not any(transfer.over for transfer in pair.both())
    pair.deaf = {SendClose}
    pair.tick(1.0)
    assert pair.reasons()[0] is Reason.REGISTRATION_TIMEOUT


def test_what_is_expected_and_nobody_waits_for_changes_nothing() -> None:
    pair = expecting()
    assert pair.finish(32, expected=True, blocks=()) == actions.PushExpected()
    assert not list(pair.p.state.transfers)
    pair.finish(32, (1,), last=False)
    assert pair.finish(32, expected=True, blocks=()) == actions.PushExpected()
    assert not next(iter(pair.p.state.transfers)).over
