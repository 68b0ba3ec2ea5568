"""The ranks of a pull: postings that end, break or are lost, and the blocks into which they write."""

import pytest

from kvgrpc.core import events
from kvgrpc.core.actions import (
    BlocksReturnedNews,
    FailedNews,
    MakeOffer,
    MapPeer,
    Post,
    SendClose,
    SendOpen,
    SendSettle,
    TransferChanged,
    UnmapPeer,
)
from kvgrpc.core.events import AllocateBlocks, EndpointOffered, PeerSilent, PostingEnded
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.transfers import Disposition, State, Transfer
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import Exhausted, PreconditionFailed, Reason
from tests.core.nodes import Lead, access_id, describe, endpoint, endpoints, full, grant, key_of, refused, snapshot
from tests.core.receive.pull_stages import LOST, TOKEN, P, at_stage, cancel, failure_of, opened, posted


@pytest.fixture
def lead() -> Lead:
    """Makes a lead that is connected to P."""
    made = Lead(describe("d", 2))
    made.admit(P)
    return made


def test_a_broken_posting_fails_the_pull_and_names_the_rank() -> None:
    source, lead = describe("p", 1, world_size=2), Lead(describe("d", 2, world_size=2))
    lead.admit(source)
    pull = lead.pull(TOKEN, 32, (4, 5))
    opened(lead)
    posted(lead, pull, 1, done=False)
    failure = failure_of(lead, pull)
    assert (failure.reason, failure.rank, failure.phase) == (Reason.DATA_PATH_FAILED, 1, "wire")
    assert lead.transfer(pull.id).memory is Disposition.QUARANTINED, "rank 0 may still write"
    assert [type(news) for news in lead.news()] == [FailedNews]
    posted(lead, pull, 0)
    assert lead.transfer(pull.id).memory is Disposition.RETURNED
    assert lead.news() == [BlocksReturnedNews(pull.id, "")]
    assert lead.transfer(pull.id).failure == failure


def test_blocks_stay_in_quarantine_until_the_last_posting_ended(lead: Lead) -> None:
    pull = at_stage(lead, "wire")
    lead.tick(31.0)
    assert (lead.transfer(pull.id).state, lead.transfer(pull.id).memory) == (State.FAILED, Disposition.QUARANTINED)
    assert lead.state.pool.pins.has(pull.id, PinKind.QUARANTINE)
    with refused(Reason.BLOCK_PINNED):
        lead.pull(TOKEN, 32, (5, 6), number=2)
    with refused(Reason.BLOCK_PINNED):
        lead.finish(16, (4,))
    lead.tick(1e6)
    assert lead.transfer(pull.id).memory is Disposition.QUARANTINED, "no timeout proves anything"
    posted(lead, pull)
    assert lead.transfer(pull.id).memory is Disposition.RETURNED
    assert len(lead.state.pool.pins) == 0


@pytest.mark.parametrize("done", [False, True])
def test_late_news_of_a_posting_changes_no_outcome(lead: Lead, done: bool) -> None:
    pull = at_stage(lead, "wire")
    cancel(lead, transfer_id=pull.id)
    failure = failure_of(lead, pull)
    posted(lead, pull, done=done)
    assert lead.transfer(pull.id).state is State.CANCELLED
    assert lead.transfer(pull.id).failure == failure
    assert posted(lead, pull) == []


@pytest.mark.parametrize("done", [False, True])
def test_a_posting_without_proof_of_rest_keeps_its_blocks(lead: Lead, done: bool) -> None:
    pull = at_stage(lead, "wire")
    lost = PostingEnded(f"{pull.id}/0.0", done, message="the transport broke", quiesced=False)
    lead.feed(lost)
    assert failure_of(lead, pull).reason is Reason.DATA_PATH_FAILED
    assert failure_of(lead, pull).rank == 0
    assert lead.transfer(pull.id).memory is Disposition.QUARANTINED
    assert [type(news) for news in lead.news()] == [FailedNews]
    assert lead.feed(lost) == []
    posted(lead, pull, done=False)
    assert lead.transfer(pull.id).memory is Disposition.RETURNED
    assert lead.feed(lost) == []


def test_what_is_in_quarantine_says_which_proof_is_missing() -> None:
    source = describe("p", 1, world_size=2)
    lead = Lead(describe("d", 2, world_size=2))
    lead.admit(source)
    pull = lead.pull(TOKEN, 32, (4, 5))
    opened(lead)
    assert lead.node.missing_proof(pull.id) == "", "it is not over"
    lead.feed(PostingEnded(f"{pull.id}/1.1", done=False, message="the transport broke", quiesced=False))
    flying, lost = lead.node.missing_proof(pull.id).split("; ")
    assert flying == "the end of the posting of rank 0"
    assert "rank 1" in lost
    assert "end of the engine's life" in lost
    posted(lead, pull, 0)
    assert lead.node.missing_proof(pull.id) == lost, "nothing can be waited for any more"
    posted(lead, pull, 1)
    assert lead.node.missing_proof(pull.id) == ""


def test_the_oldest_posting_in_flight_is_known_and_a_lost_one_is_not_in_flight(lead: Lead) -> None:
    assert lead.node.oldest_posting() is None
    pulls = []
    for number, blocks in enumerate([(4, 5), (6, 7)], 1):
        pulls.append(lead.pull(TOKEN, 32, blocks, number=number))
        lead.tick(1.0)
        opened(lead, number)
    assert lead.node.oldest_posting() == lead.now - 1.0
    cancel(lead, transfer_id=pulls[0].id)
    assert lead.node.oldest_posting() == lead.now - 1.0, "it may still write"
    lead.feed(PostingEnded(f"{pulls[0].id}/0.0", done=False, quiesced=False))
    assert lead.node.oldest_posting() == lead.now
    posted(lead, pulls[1])
    assert lead.node.oldest_posting() is None


def test_too_much_in_quarantine_stops_new_work_until_it_is_at_rest() -> None:
    lead = Lead(describe("d", 2, pool=full(8), pool_kind=PoolKind.SERVER_MANAGED), Limits(quarantine_share=0.25))
    lead.admit(P)
    lead.call(lambda c: AllocateBlocks(c, ((0, 6),)))
    pulls = [lead.pull(TOKEN, 32, blocks, number=i) for i, blocks in enumerate([(0, 1), (2, 3)], 1)]
    for number in (1, 2):
        opened(lead, number)
    cancel(lead, transfer_id=pulls[0].id)
    assert lead.state.pool.quarantine_full() == "", "two of eight is all that may be"
    cancel(lead, transfer_id=pulls[1].id)
    assert "4 of 8 blocks of group 0" in lead.state.pool.quarantine_full()
    before = snapshot(lead.node)
    for work in (
        lambda: lead.finish(16, (4,)),
        lambda: lead.pull(TOKEN, 32, (4, 5), number=3),
        lambda: lead.call(lambda c: AllocateBlocks(c, ((0, 1),))),
    ):
        with refused(Reason.QUARANTINED, Exhausted):
            work()
    assert snapshot(lead.node) == before
    posted(lead, pulls[0])
    assert lead.state.pool.quarantine_full() == ""
    lead.pull(TOKEN, 32, (4, 5), number=3)


def test_after_a_broken_posting_the_peer_is_mapped_anew(lead: Lead) -> None:
    broken = at_stage(lead, "wire")
    posted(lead, broken, done=False)
    assert lead.one(UnmapPeer) == UnmapPeer(0, key_of(P))
    lead.pull(TOKEN, 32, (6, 7), number=2)
    assert lead.seen(SendOpen) == []
    lead.connect(P)
    assert lead.one(SendOpen).opening.access_id == access_id(2)


def broken_beside(lead: Lead) -> Transfer:
    """Makes a pull whose access is open and which waits for blocks; then breaks a posting from the same peer."""
    waiting = lead.pull(TOKEN, number=2)
    opened(lead, 2)
    posted(lead, at_stage(lead, "wire"), done=False)
    return waiting


def test_a_pull_that_waits_meanwhile_posts_once_the_peer_is_mapped_again(lead: Lead) -> None:
    waiting = broken_beside(lead)
    lead.give(waiting.id, (6, 7))
    assert lead.seen(Post) == []
    assert lead.transfer(waiting.id).waiting_for == "handshake"
    lead.connect(P)
    assert lead.one(Post).transfer_id == waiting.id
    assert lead.seen(SendOpen) == [], "its access is open"


def test_a_pull_that_needs_no_bytes_needs_no_mapping(lead: Lead) -> None:
    waiting = broken_beside(lead)
    lead.give(waiting.id)
    assert lead.one(SendSettle).settling.access_id == access_id(2)


def test_a_pull_whose_peer_cannot_be_mapped_again_fails(lead: Lead) -> None:
    waiting = broken_beside(lead)
    lead.give(waiting.id, (6, 7))
    lead.feed(events.DialFailed("p:1", LOST))
    assert failure_of(lead, waiting).reason is Reason.PEER_UNREACHABLE
    assert lead.one(SendClose).closing.access_id == access_id(2)


def test_a_pull_whose_peer_comes_back_as_another_life_fails(lead: Lead) -> None:
    waiting = broken_beside(lead)
    lead.give(waiting.id, (6, 7))
    following = describe("p", 9)
    lead.feed(events.PeerAnswered("p:1", following, endpoints(following)))  # the new life has its own secrets
    lead.connect(following)
    assert failure_of(lead, waiting).reason is Reason.PEER_LOST


def test_waiting_to_be_mapped_again_ends_too(lead: Lead) -> None:
    waiting = broken_beside(lead)
    lead.give(waiting.id, (6, 7))
    cancel(lead, transfer_id=waiting.id)
    lead.connect(P)
    assert lead.seen(Post) == []


def test_only_those_who_expect_the_engine_that_answers_go_on(lead: Lead) -> None:
    waiting = broken_beside(lead)
    other = lead.pull(grant(describe("x", 9, address="p:1")), 32, (8, 9), number=3)
    lead.feed(EndpointOffered(0, lead.one(MakeOffer).key, endpoint()))
    lead.give(waiting.id, (6, 7))
    lead.feed(events.DialFailed("p:1", PreconditionFailed(Reason.WRONG_ENGINE, "this is p")))
    assert failure_of(lead, other).reason is Reason.WRONG_ENGINE
    assert lead.transfer(waiting.id).waiting_for == "handshake"
    lead.connect(P)
    assert lead.one(Post).transfer_id == waiting.id


def test_several_broken_postings_map_the_peer_anew_once() -> None:
    source, lead = describe("p", 1, world_size=2), Lead(describe("d", 2, world_size=2))
    lead.admit(source)
    pulls = [lead.pull(TOKEN, 32, (4 * n, 4 * n + 1), number=n) for n in range(1, 5)]
    for number in range(1, 5):
        opened(lead, number)
    posted(lead, pulls[0], 0, done=False)
    assert len(lead.seen(UnmapPeer)) == 2
    posted(lead, pulls[0], 1, done=False)
    posted(lead, pulls[1], 0, done=False)
    assert lead.seen(UnmapPeer) == []
    lead.pull(TOKEN, 32, (40, 41), number=9)
    lead._offer()
    lead.feed(events.PeerAnswered("p:1", source, endpoints(source)))
    maps = lead.seen(MapPeer)
    lead.feed(events.PeerMapped(0, key_of(source), "shm", ""))
    posted(lead, pulls[2], 0, done=False)
    assert lead.seen(UnmapPeer) == [], "it is being mapped already"
    lead.feed(events.PeerMapped(1, key_of(source), "shm", "", peer_rank=1))
    assert len(maps) == 2
    assert lead.one(SendOpen).opening.access_id == access_id(9)


def test_blocks_stay_in_quarantine_after_the_source_and_our_life_ended() -> None:
    source, lead = describe("p", 1, world_size=3), Lead(describe("d", 2, world_size=3))
    lead.admit(source)
    pull = lead.pull(TOKEN, 32, (4, 5))
    opened(lead)
    cancel(lead, transfer_id=pull.id)
    lead.feed(PeerSilent(key_of(source)))
    lead.tick(10.0)
    posted(lead, pull, 1)
    assert lead.transfer(pull.id).memory is Disposition.QUARANTINED
    lead.begin(describe("d", 3, world_size=3))
    assert lead.seen(TransferChanged) == [], "nothing is known of it any more, which reads as quarantined"
    assert posted(lead, pull, 0) == posted(lead, pull, 2) == []
