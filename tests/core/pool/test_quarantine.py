"""Blocks into which a peer may write leave quarantine by other proofs when the peer does not say that it is at rest."""

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.tables.peers import PeerState
from kvgrpc.core.tables.transfers import Disposition, State
from kvgrpc.errors import Reason
from tests.core.nodes import access_id, answer_of, describe, grant, key_of, refused
from tests.core.pairs import WRITING, Pair
from tests.core.pool.written import Written

FORCE = "its host is off"


# ---- the end of a peer's processes


def test_blocks_come_back_when_the_process_of_every_rank_of_their_source_is_gone() -> None:
    lead = Written(ranks=2)
    lead.push(3, 4)
    lead.exit(1)
    assert lead.memory() is Disposition.QUARANTINED
    lead.exit(1)
    assert lead.memory() is Disposition.QUARANTINED
    lead.exit(0)
    assert lead.memory() is Disposition.RETURNED
    assert lead.state.peers.lives[key_of(lead.peer)].state is PeerState.DEAD


def test_the_end_of_a_process_whose_bytes_may_still_land_is_the_end_of_its_life_but_no_proof() -> None:
    lead = Written()
    lead.push(3, 4)
    lead.exit(drained=False)
    assert lead.memory() is Disposition.QUARANTINED
    assert lead.state.peers.lives[key_of(lead.peer)].state is PeerState.DEAD
    assert [action.peer for action in lead.seen(actions.UnmapPeer)] == [key_of(lead.peer)]
    call = lead.release()
    lead.rekeyed(message="a peer may write on")
    assert lead.memory() is Disposition.RETURNED, "its process is gone, and now the transport to it is too"
    assert lead.answer(call) == actions.QuarantineReleased(2, 0, 1)


def test_an_unknown_life_proves_nothing_by_its_end() -> None:
    lead = Written()
    lead.push(3, 4)
    lead.exit(life="p@7")
    assert lead.memory() is Disposition.QUARANTINED


def test_a_dead_life_that_may_still_write_is_not_forgotten_before_its_end_proves_its_writes_at_rest() -> None:
    lead = Written()
    lead.push(3, 4)
    for number in range(100):
        lead.admit(describe("p", 100 + number))
    assert key_of(lead.peer) in lead.state.peers.lives
    lead.exit()
    assert lead.memory() is Disposition.RETURNED
    lead.admit(describe("p", 200))
    assert key_of(lead.peer) not in lead.state.peers.lives


def test_the_end_of_a_peer_that_is_silent_or_lets_go_while_it_writes_is_looked_for() -> None:
    lead = Written(ranks=2)
    lead.push(3, 4)
    life = key_of(lead.peer)
    wanted = [actions.AwaitEnd(rank, life) for rank in (0, 1)]
    lead.feed(events.PeerSilent(life))
    assert lead.seen(actions.AwaitEnd) == wanted
    lead.feed(events.Tick(), 11.0)
    done = [action for action in lead.done if isinstance(action, actions.AwaitEnd | actions.UnmapPeer)]
    assert done == [*wanted, *(actions.UnmapPeer(rank, life, watch=True, gone=True) for rank in (0, 1))], (
        "before it is disconnected"
    )


# ---- at somebody's word


def test_force_needs_a_reason_and_known_transfers_and_ids_need_force() -> None:
    lead = Written()
    lead.push(3, 4)
    for fields, reason in (
        ({"force": True}, Reason.INVALID_FIELD),
        ({"transfer_ids": (lead.transfer_id,)}, Reason.INVALID_FIELD),
        ({"force": True, "why": FORCE, "transfer_ids": (lead.transfer_id, "t-x")}, Reason.TRANSFER_NOT_FOUND),
    ):
        with refused(reason):
            lead.answer(lead.release(**fields))
        assert lead.memory() is Disposition.QUARANTINED


@pytest.mark.parametrize("named", [True, False])
def test_an_operators_release_brings_back_blocks_of_all_transfers_or_of_those_named(named: bool) -> None:
    lead = Written()
    lead.push(3, 4)
    first = lead.transfer_id
    lead.push(5, 6, number=11)
    answer = lead.answer(lead.release(force=True, why=FORCE, transfer_ids=(first,) if named else ()))
    assert answer == actions.QuarantineReleased(2, 2, 0) if named else actions.QuarantineReleased(4, 0, 0)
    assert lead.transfer(first).memory is Disposition.RETURNED
    assert lead.memory() is (Disposition.QUARANTINED if named else Disposition.RETURNED)
    assert not lead.state.pool.rekeying


def test_what_comes_after_an_operators_release_changes_nothing() -> None:
    lead = Written()
    lead.push(3, 4)
    lead.release(force=True, why=FORCE)
    assert not lead.settle(lead.peer, 10).valid
    assert not lead.settle(lead.peer, 10).valid
    source = describe("s", 8)
    pull = lead.pull(grant(source), 32, (8, 9))
    lead.connect(source)
    lead.feed(events.AccessAnswered(access_id(1), answer_of(source)))
    posting = lead.one(actions.Post).posting_id
    lead.feed(events.PostingEnded(posting, done=False, quiesced=False))
    lead.release(force=True, why=FORCE)
    lead.feed(events.PostingEnded(posting, done=False))
    assert lead.transfer(pull.id).memory is Disposition.RETURNED
    assert not len(lead.state.pool.pins)


def test_after_an_operators_release_own_postings_count_no_more_whatever_they_report() -> None:
    pair = Pair(WRITING)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    pair.call(pair.p, lambda c: events.CancelTransfer(c, pair.both()[0].id))
    assert pair.both()[0].memory is Disposition.QUARANTINED
    for lead in (pair.p, pair.d):
        pair.call(lead, lambda c: events.ReleaseQuarantine(c, force=True, why=FORCE), "operator")
    assert [transfer.memory for transfer in pair.both()] == [Disposition.RETURNED] * 2
    pair.moved(done=False)
    assert not len(pair.p.state.pool.pins)
    assert pair.p.state.moves.turns.nbytes == 0


# ---- writes that outlive their posting


def test_a_write_that_ended_here_only_gives_the_source_its_blocks_and_proves_nothing_at_the_destination() -> None:
    pair = Pair(WRITING)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    pair.moved(done=False, quiesced=False, own_at_rest=True)
    source, destination = pair.both()
    assert not source.over, "another destination may come"
    assert (destination.state, destination.memory) == (State.FAILED, Disposition.QUARANTINED)
    pair.call(pair.p, lambda c: events.CancelTransfer(c, source.id))
    assert pair.both()[0].memory is Disposition.RETURNED
    assert pair.both()[1].memory is Disposition.QUARANTINED


def test_parts_that_replace_others_never_race_a_write_that_may_still_land() -> None:
    pair = Pair(WRITING)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2), last=False)
    pair.finish(32, (5, 6), part_epoch=1)
    pair.moved(done=False, quiesced=False, own_at_rest=True)
    assert not pair.posts
    assert (pair.both()[1].state, pair.both()[1].memory) == (State.FAILED, Disposition.QUARANTINED)
