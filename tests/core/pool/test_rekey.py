"""A re-key registers memory again, which proves peers' writes at rest; an operator or the lead itself starts it."""

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.transfers import Disposition, State
from kvgrpc.core.values.compatibility import READS_PUSHES, EngineDescription
from kvgrpc.errors import Reason
from tests.core.nodes import access_id, answer_of, claim, content, describe, grant, key_of, lists, refused
from tests.core.pairs import WRITING, Pair
from tests.core.pool.written import Written

# ---- re-key


def test_a_rekey_waits_for_what_ends_by_itself_then_proves_what_peers_wrote_at_rest() -> None:
    lead = Written()
    lead.push(3, 4)
    call = lead.release()
    assert not lead.seen(actions.Rekey), "the source lives, and may still say that it is at rest"
    assert lead.state.timers.next_deadline() is not None
    lead.tick(30.0)
    assert lead.one(actions.Rekey) == actions.Rekey(0)
    assert lead.answer(call) is None
    lead.rekeyed()
    assert lead.memory() is Disposition.RETURNED
    assert lead.answer(call) == actions.QuarantineReleased(2, 0, 1)
    assert lead.me.memory_generation == 1


def test_a_rekey_needs_the_report_of_every_rank_once() -> None:
    lead = Written(ranks=2)
    lead.push(3, 4)
    lead.rekeyed(0)
    lead.release()
    lead.tick(30.0)
    assert [action.rank for action in lead.seen(actions.Rekey)] == [0, 1]
    lead.rekeyed(1)
    lead.rekeyed(1)
    assert lead.memory() is Disposition.QUARANTINED
    lead.rekeyed(0)
    assert lead.memory() is Disposition.RETURNED


@pytest.mark.parametrize("message", ["", "a peer may write on"])
def test_what_a_rekey_does_not_prove_stays_in_quarantine(message: str) -> None:
    lead = Written()
    lead.push(3, 4)
    call = lead.release()
    lead.tick(30.0)
    lead.rekeyed(message=message)
    left = 2 if message else 0
    assert lead.answer(call) == actions.QuarantineReleased(2 - left, left, 1)
    assert lead.memory() is (Disposition.QUARANTINED if message else Disposition.RETURNED)


def test_a_source_that_says_meanwhile_that_it_is_at_rest_makes_the_rekey_go_on() -> None:
    lead = Written()
    lead.push(3, 4)
    lead.release()
    assert lead.close(lead.peer, 10)
    assert lead.one(actions.Rekey)


def test_peers_have_to_shake_hands_again_after_a_rekey_before_they_open_anything() -> None:
    lead = Written()
    lead.push(3, 4)
    handed = lead.finish(32, (8, 9), key=b"another key, 128", ttl_s=60.0)
    lead.release()
    lead.tick(30.0)
    read = AccessOpening(access_id(50), handed.token, claim(32))
    with refused(Reason.QUARANTINED):
        lead.opened(lead.peer, read)
    lead.rekeyed()
    with refused(Reason.NO_HANDSHAKE):
        lead.opened(lead.peer, read)
    lead.admit(lead.peer)
    (row,) = lead.opened(lead.peer, read)
    assert row.memory_generation == 1, "its lease lives on"


def test_what_is_read_or_waits_to_be_read_ends_with_a_rekey_but_its_lease_does_not() -> None:
    lead = Written()
    lead.push(3, 4)
    handed = lead.finish(32, (8, 9), key=b"another key, 128")
    lead.opened(lead.peer, AccessOpening(access_id(50), handed.token, claim(32)))
    early = lead.open(lead.peer, AccessOpening(access_id(51), grant(lead.me, lease_id="l-later"), claim(32)))
    lead.release()
    assert lead.answer(early).rows[0].reason is Reason.QUARANTINED
    assert lead.settle(lead.peer, 50).reason is Reason.MEMORY_CHANGED
    assert [lease.id for lease in lead.state.send.leases] == [handed.lease.id]


def test_no_new_work_is_taken_while_the_memory_is_registered_anew() -> None:
    lead = Written()
    lead.push(3, 4)
    lead.release()
    with refused(Reason.QUARANTINED):
        lead.finish(32, (8, 9), key=b"another key, 128")
    lead.tick(30.0)
    lead.rekeyed()
    lead.finish(32, (8, 9), key=b"another key, 128")


def test_pulls_with_an_access_fail_and_those_without_go_on_after_the_rekey() -> None:
    lead = Written()
    lead.push(3, 4)
    source, other = describe("s", 8), describe("o", 9)
    reading = lead.pull(grant(source, key=b"1" * 16), 32, (8, 9), number=60)
    lead.connect(source)
    lead.feed(events.AccessAnswered(access_id(60), answer_of(source)))
    posting = lead.one(actions.Post)
    waiting = lead.pull(grant(other, key=b"2" * 16), 32, (10, 11), number=61)
    lead.release()
    failed = lead.transfer(reading.id)
    assert (failed.state, failed.failure and failed.failure.reason) == (State.FAILED, Reason.MEMORY_CHANGED)
    lead.connect(other)
    lead.feed(events.AccessAnswered(access_id(61), answer_of(other)))
    assert not lead.seen(actions.Post), "nothing is posted meanwhile"
    lead.feed(events.PostingEnded(posting.posting_id, done=False))
    assert lead.transfer(reading.id).memory is Disposition.RETURNED
    lead.feed(events.PeerSilent(key_of(lead.peer)))
    lead.tick(10.0)
    assert lead.seen(actions.Rekey), "nobody is left to wait for"
    lead.rekeyed()
    lead.connect(other)
    assert lead.one(actions.Post).transfer_id == waiting.id


def test_a_handshake_that_a_rekey_overtakes_is_begun_again_by_who_needs_it() -> None:
    lead = Written()
    lead.push(3, 4)
    asked = lead.ask(lambda c: events.HandshakeReceived(c, describe("q", 5), ()), "peer")
    with refused(Reason.INVALID_FIELD):
        lead.answer(asked)
    lead.feed(events.PeerSilent(key_of(lead.peer)))
    lead.tick(10.0)
    dialling = lead.ask(lambda c: events.ConnectPeer(c, "s:1"), "operator")
    lead.release()
    lead.rekeyed()
    with refused(Reason.MEMORY_CHANGED):
        lead.answer(dialling)


def test_of_a_posting_that_was_lost_a_later_end_is_the_proof() -> None:
    lead = Written()
    source = describe("s", 8)
    pull = lead.pull(grant(source), 32, (8, 9))
    lead.connect(source)
    lead.feed(events.AccessAnswered(access_id(1), answer_of(source)))
    posting = lead.one(actions.Post).posting_id
    lead.feed(events.PostingEnded(posting, done=False, quiesced=False))
    assert lead.transfer(pull.id).memory is Disposition.QUARANTINED
    lead.release()
    assert lead.one(actions.Rekey)
    lead.feed(events.PostingEnded(posting, done=False))
    assert lead.transfer(pull.id).memory is Disposition.RETURNED
    lead.rekeyed()


def test_calls_during_a_rekey_get_its_answer_and_calls_too_soon_after_are_told_when() -> None:
    lead = Written(rekey_interval_s=60.0)
    lead.push(3, 4)
    calls = [lead.release(), lead.release()]
    lead.tick(30.0)
    lead.rekeyed(message="a peer may write on")
    assert {lead.answer(call).left for call in calls} == {2}
    lead.tick(59.0)
    with refused(Reason.QUARANTINED) as _:
        lead.answer(lead.release())
    lead.tick(1.0)
    again = lead.release()
    lead.tick(30.0)
    lead.rekeyed()
    assert lead.answer(again) == actions.QuarantineReleased(0, 2, 2), "it wrote by data paths of before the first one"


def test_ranks_that_do_not_report_are_told_of_and_the_rekey_ends_when_they_do() -> None:
    lead = Written()
    lead.push(3, 4)
    call = lead.release()
    lead.tick(30.0)
    lead.tick(15.0)
    with refused(Reason.DEADLINE):
        lead.answer(call)
    lead.rekeyed()
    assert lead.memory() is Disposition.RETURNED
    assert not lead.state.pool.rekeying


def test_where_nothing_is_in_quarantine_nothing_is_done() -> None:
    lead = Written()
    assert lead.answer(lead.release()) == actions.QuarantineReleased(0, 0, 0)
    assert not lead.state.pool.rekeying


def test_the_end_of_the_engine_s_life_ends_a_rekey() -> None:
    lead = Written()
    lead.push(3, 4)
    call = lead.release()
    lead.begin(describe("d", 9))
    with refused(Reason.ENGINE_LOST):
        lead.answer(call)
    assert not lead.state.pool.rekeying
    lead.rekeyed()
    assert lead.me.memory_generation == 0


# ---- by itself


def test_too_much_in_quarantine_for_longer_than_the_grace_leads_to_a_rekey() -> None:
    lead = Written(quarantine_share=0.02)
    lead.push(3, 4)
    lead.tick(9.9)
    assert not lead.state.pool.rekeying
    lead.tick(0.1)
    assert lead.state.pool.rekeying
    lead.tick(30.0)
    lead.rekeyed()
    assert lead.memory() is Disposition.RETURNED


def test_what_is_no_more_than_the_budget_when_the_grace_is_over_leads_to_none() -> None:
    lead = Written(quarantine_share=0.04)
    for number in (10, 11):
        lead.push(3 + 2 * number, 4 + 2 * number, number=number)
    lead.tick(9.0)
    assert lead.close(lead.peer, 10)
    lead.tick(30.0)
    assert not lead.state.pool.rekeying
    assert sum(lead.state.pool.pins.quarantined) == 2


def test_what_came_later_into_quarantine_has_its_own_grace() -> None:
    lead = Written(quarantine_share=0.04)
    for number in (10, 11):
        lead.push(3 + 2 * number, 4 + 2 * number, number=number)
    for number in (10, 11):
        assert lead.close(lead.peer, number)
    lead.tick(8.0)
    for number in (12, 13):
        lead.push(3 + 2 * number, 4 + 2 * number, number=number)
    lead.tick(9.9)
    assert not lead.state.pool.rekeying
    lead.tick(0.2)
    assert lead.state.pool.rekeying


def test_what_comes_to_rest_within_the_grace_leads_to_nothing() -> None:
    lead = Written(quarantine_share=0.02)
    lead.push(3, 4)
    assert lead.close(lead.peer, 10)
    lead.tick(60.0)
    assert not lead.state.pool.rekeying
    assert lead.memory() is Disposition.RETURNED


def test_little_in_quarantine_may_stay_there() -> None:
    lead = Written()
    lead.push(3, 4)
    lead.tick(100.0)
    assert not lead.state.pool.rekeying


def test_a_rekey_that_proved_nothing_is_not_repeated_for_the_same_blocks() -> None:
    lead = Written(quarantine_share=0.02)
    lead.push(3, 4)
    lead.tick(40.0)
    lead.tick(0.0)
    lead.rekeyed(message="a peer may write on")
    assert lead.memory() is Disposition.QUARANTINED
    for _ in range(20):
        lead.tick(20.0)
        assert not lead.state.pool.rekeying


def test_an_engine_that_cannot_set_blocks_aside_admits_no_writes_and_ends_quarantines() -> None:
    lead = Written(sets_aside=False)
    key = b"k" * 16
    reserved = lead.call(lambda c: events.ReserveBlocks(c, key, lists((3, 4)), content=content(32)))
    (row,) = lead.opened(lead.peer, lead.opening(reserved.token, 2, 10))
    assert row.reason is Reason.FEATURE_UNAVAILABLE
    source = describe("s", 8)
    pull = lead.pull(grant(source), 32, (8, 9))
    lead.connect(source)
    lead.feed(events.AccessAnswered(access_id(1), answer_of(source)))
    lead.feed(events.PostingEnded(lead.one(actions.Post).posting_id, done=False, quiesced=False))
    assert lead.transfer(pull.id).memory is Disposition.QUARANTINED
    lead.tick(10.0)
    assert lead.one(actions.Rekey)


@pytest.mark.parametrize("features", [(), (READS_PUSHES,)])
def test_who_reads_what_is_pushed_to_it_is_not_written_to(features: tuple[str, ...]) -> None:
    pair = Pair(WRITING)
    me: EngineDescription = describe("d", 2, features=features)
    pair.p.begin(describe("p", 1))
    pair.p.admit(me)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.deaf = {actions.SendOpen}
    pair.p.state.peers.lives[key_of(me)].dialled = me.address
    pair.finish(32, (1, 2))
    ((_, sent),) = pair.lost
    assert isinstance(sent, actions.SendOpen)
    assert bool(sent.opening.reverse_access_id) is bool(features)
