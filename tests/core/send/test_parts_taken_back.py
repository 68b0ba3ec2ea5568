"""An engine takes the blocks of its parts back: when the blocks are its own again, and what it may say afterwards."""

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.actions import SendClose, SendOpen
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.transfers import Disposition, State
from kvgrpc.errors import Reason
from tests.core.nodes import KEY, access_id
from tests.core.pairs import MODES, WRITING, Pair, Writers
from tests.core.send.epochs import lease_of, returned, start_over


@MODES
def test_an_engine_that_took_its_parts_back_has_the_time_of_a_registration_to_start_over(writers: Writers) -> None:
    pair = Pair(writers, registration_timeout_s=20.0)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    pair.feed(pair.p, events.LeasesVoided((lease_of(pair),)))
    pair.moved()
    assert [t.over for t in pair.both()] == [False, False]
    assert pair.both()[0].waiting_for == "parts"
    pair.tick(20.0)
    assert pair.reasons() == [Reason.REGISTRATION_TIMEOUT, pair.reasons()[1]]
    assert all(t.over for t in pair.both())
    assert not len(pair.p.state.pool.pins) + len(pair.d.state.pool.pins)
    assert [type(news) for news in pair.told["p"]][-2:] == [actions.FailedNews, actions.BlocksReturnedNews]


@MODES
@pytest.mark.parametrize("moved", [True, False])
def test_an_engine_that_took_its_parts_back_may_say_that_it_cannot_deliver(writers: Writers, moved: bool) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    pair.feed(pair.p, events.LeasesVoided((lease_of(pair),)))
    if moved:
        pair.moved()
    pair.finish(failure="no room", blocks=(), content=None)
    pair.moved()
    assert pair.reasons() == [Reason.SOURCE_FAILED, Reason.SOURCE_FAILED]
    assert [t.memory for t in pair.both()] == [Disposition.RETURNED] * 2
    assert not len(pair.p.state.pool.pins) + len(pair.d.state.pool.pins)


def test_a_pull_ends_when_its_blocks_are_taken_back() -> None:
    pair = Pair()
    lease = pair.finish(32, waits_for=events.WaitsFor.READERS).lease
    pair.feed(pair.p, events.LeasesVoided((lease.id,)))
    (sent,) = pair.p.state.transfers
    assert sent.state is State.CANCELLED
    failure = sent.failure
    assert failure is not None
    assert failure.reason is Reason.LEASE_VOIDED


def reopening_lost(writers: Writers) -> Pair:
    """Starts a prefill over, without the destination hearing of it."""
    pair = Pair(writers)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1,), last=False)
    pair.moved()
    pair.deaf = {SendOpen, SendClose}
    start_over(pair, False)
    return pair


@MODES
@pytest.mark.parametrize("cancelled", [False, True])
def test_a_source_that_gives_up_anew_proves_its_earlier_writes_at_rest(writers: Writers, cancelled: bool) -> None:
    pair = reopening_lost(writers)
    if cancelled:
        pair.call(pair.d, lambda c: events.CancelTransfer(c, pair.both()[1].id))
        assert pair.both()[1].memory is (Disposition.QUARANTINED if writers else Disposition.RETURNED)
    pair.finish(failure="no", blocks=(), content=None)
    pair.lost = [row for row in pair.lost if isinstance(row[1], SendClose)]
    pair.recover()
    assert all(t.over for t in pair.both())
    assert [t.memory for t in pair.both()] == [Disposition.RETURNED] * 2
    assert not len(pair.p.state.pool.pins) + len(pair.d.state.pool.pins)


def test_giving_up_without_a_proof_leaves_what_was_written_in_quarantine() -> None:
    pair = reopening_lost(WRITING)
    token = next(action.opening.token for action in pair.sent if isinstance(action, SendOpen))
    row = events.AccessClosing(access_id(90), events.CloseOutcome.DROPPED, quiesced=False, token=token)
    pair.call(pair.d, lambda c: events.CloseAccess(c, "p", 1, (row,)), "peer")
    assert pair.both()[1].memory is Disposition.QUARANTINED


def test_blocks_that_our_own_posting_still_reads_are_returned_after_it_also_without_a_lease() -> None:
    pair = Pair(WRITING)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    start_over(pair, False)
    pair.feed(pair.p, events.LeasesVoided((lease_of(pair),)))
    pair.finish(failure="no", blocks=(), content=None)
    assert pair.both()[0].memory is Disposition.QUARANTINED
    pair.moved()
    assert pair.both()[0].memory is Disposition.RETURNED
    assert [type(news) for news in pair.told["p"]][-1] is actions.BlocksReturnedNews
    assert not len(pair.p.state.pool.pins)


def test_blocks_of_a_push_that_is_over_can_be_taken_back_from_our_own_posting() -> None:
    pair = Pair(WRITING)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    lease_id = lease_of(pair)
    pair.call(pair.p, lambda c: events.CancelTransfer(c, key=KEY))
    assert pair.both()[0].memory is Disposition.QUARANTINED
    pair.feed(pair.p, events.LeasesVoided((lease_id,)))
    assert pair.both()[0].memory is Disposition.RETURNED
    assert not len(pair.p.state.pool.pins)
    told = len(pair.told["p"])
    pair.moved()
    pair.feed(pair.p, events.LeasesVoided((lease_id,)))
    assert len(pair.told["p"]) == told, "once"


def test_blocks_can_be_taken_back_however_long_their_lease_has_ended() -> None:
    pair = Pair(WRITING, ended_leases=0)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    lease_id = lease_of(pair)
    pair.call(pair.p, lambda c: events.CancelTransfer(c, key=KEY))
    assert pair.p.state.send.leases.find(lease_id) is None
    pair.feed(pair.p, events.LeasesVoided((lease_id,)))
    assert pair.both()[0].memory is Disposition.RETURNED
    assert not len(pair.p.state.pool.pins)


def test_taking_back_the_last_parts_leaves_those_that_were_replaced_to_the_posting_that_reads_them() -> None:
    pair = Pair(WRITING)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    first = lease_of(pair)
    start_over(pair, False)
    last = lease_of(pair)
    pair.call(pair.p, lambda c: events.CancelTransfer(c, key=KEY))
    pair.feed(pair.p, events.LeasesVoided((last,)))
    assert pair.both()[0].memory is Disposition.QUARANTINED
    reading = pair.posts[0][1].posting_id.rpartition("/")[0]
    assert pair.p.state.pool.pins.blocks(reading, PinKind.ACCESS)[0].tolist() == [1, 2]
    assert not returned(pair)
    pair.moved()
    assert returned(pair) == [first]
    assert pair.both()[0].memory is Disposition.RETURNED
    assert [type(news) for news in pair.told["p"]][-1] is actions.BlocksReturnedNews
    assert not len(pair.p.state.pool.pins)
