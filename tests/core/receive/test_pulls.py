"""A pull from PullBlocks to the return of its blocks: it succeeds in one way, and fails closed otherwise."""

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.actions import (
    BlocksReturnedNews,
    FailedNews,
    Post,
    PullOpenedNews,
    ReceivedNews,
    Reply,
    SendOpen,
    SendSettle,
    TellEngine,
    TransferChanged,
)
from kvgrpc.core.events import AccessAnswered, CloseAnswered, Destination, SettleAnswered
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import Direction, Disposition, State
from kvgrpc.core.values.layout import GroupKind
from kvgrpc.core.values.owners import SCHEDULER
from kvgrpc.errors import InvalidRequest, NextStep, OutOfRange, PermissionDenied, PreconditionFailed, Reason
from tests.core.nodes import (
    KEY,
    Lead,
    access_id,
    answer_of,
    content,
    describe,
    grant,
    hybrid,
    key_of,
    refused,
    snapshot,
)
from tests.core.receive.pull_stages import STAGES, TOKEN, P, at_stage, cancel, failure_of, opened, posted, settled


@pytest.fixture
def lead() -> Lead:
    """Makes a lead that is connected to P."""
    made = Lead(describe("d", 2))
    made.admit(P)
    return made


# -- the whole life


def test_the_life_of_a_pull() -> None:
    lead = Lead(describe("d", 2))
    made = lead.pull(TOKEN, 32, (4, 5), request_id="r", priority=3)
    assert (made.direction, made.state, made.memory) == (Direction.RECEIVE, State.PENDING, Disposition.HELD)
    assert (made.waiting_for, made.use_tokens, made.lease_id) == ("handshake", 32, "l-1")
    assert (made.peer_engine_id, made.peer_incarnation, made.peer_address) == ("p", 1, "p:1")
    assert lead.state.pool.pins.has(made.id, PinKind.TARGET)

    lead.connect(P)
    send = lead.one(SendOpen)
    assert (send.peer, send.opening.token, send.opening.transfer_id) == (key_of(P), TOKEN, made.id)
    assert send.opening.claim is not None
    assert (send.opening.claim.tokens, send.opening.data_paths) == (32, ("loopback",))

    opened(lead)
    assert lead.news() == [], "it has its blocks: the engine needs to know nothing before the end"
    post = lead.one(Post)
    assert (post.peer, post.transfer_id, post.rank) == (key_of(P), made.id, 0)
    assert (post.runs.src.tolist(), post.runs.dst.tolist()) == ([0, 512], [32, 544])
    assert lead.transfer(made.id).state is State.ACTIVE
    assert (lead.transfer(made.id).blocks, lead.transfer(made.id).nbytes) == (2, 32)

    posted(lead, made)
    assert lead.one(SendSettle).settling == events.AccessSettling(access_id(), last=True, nbytes=32)
    assert lead.news() == [], "nothing is offered before the source has vouched for it"

    settled(lead)
    done = lead.transfer(made.id)
    assert (done.state, done.memory, done.nbytes_done) == (State.SUCCEEDED, Disposition.RETURNED, 32)
    assert [phase.name for phase in done.phases] == ["handshake", "open", "queue", "wire", "settle"]
    assert all(phase.end is not None for phase in done.phases)
    assert lead.news() == [ReceivedNews(made.id, "r", 32)]
    assert [type(action) for action in lead.done] == [TransferChanged, TellEngine], "first ended, then told"
    assert lead.state.moves.bytes_received == 32
    assert (len(lead.state.pool.pins), lead.state.timers.next_deadline()) == (0, None)


def test_the_call_is_answered_before_the_engine_is_told_anything(lead: Lead) -> None:
    lead.pull(grant(describe("x", 9, address="")), 32, (4, 5))
    kinds = [type(action) for action in lead.done]
    assert kinds.index(Reply) < kinds.index(TellEngine)


def test_a_destination_may_come_later(lead: Lead) -> None:
    pull = lead.pull(TOKEN, request_id="r")
    opened(lead)
    assert lead.news() == [PullOpenedNews(pull.id, "r", 32)]
    assert lead.transfer(pull.id).waiting_for == "blocks"
    assert len(lead.state.pool.pins) == 0
    lead.give(pull.id, (4, 5))
    assert lead.one(Post)
    assert lead.state.pool.pins.has(pull.id, PinKind.TARGET)


def test_a_destination_may_come_before_the_access_is_open(lead: Lead) -> None:
    pull = lead.pull(TOKEN)
    lead.give(pull.id, (4, 5))
    assert lead.seen(Post) == []
    opened(lead)
    assert lead.one(Post)


def test_a_destination_is_given_once(lead: Lead) -> None:
    pull = lead.pull(TOKEN)
    lead.give(pull.id, (4, 5))
    with refused(Reason.TRANSFER_EXISTS, PreconditionFailed):
        lead.give(pull.id, (6, 7))


@pytest.mark.parametrize("later", [False, True])
def test_an_empty_destination_settles_and_releases_the_source(lead: Lead, later: bool) -> None:
    empty = Destination((), 32)
    pull = lead.pull(TOKEN, destination=None if later else empty)
    opened(lead)
    if later:
        lead.give(pull.id, have_tokens=32)
    assert lead.seen(Post) == []
    assert lead.one(SendSettle).settling == events.AccessSettling(access_id(), last=True, nbytes=0)
    settled(lead)
    assert lead.transfer(pull.id).state is State.SUCCEEDED
    assert lead.news() == [ReceivedNews(pull.id, "", 32)]


def test_an_empty_destination_waits_for_no_step(lead: Lead) -> None:
    lead.pull(TOKEN, destination=Destination(()), after_step=9)
    opened(lead)
    assert lead.seen(SendSettle)


def test_blocks_that_are_held_are_not_moved(lead: Lead) -> None:
    token = grant(P, tokens=64)
    pull = lead.pull(token, 64, (8, 9), have_tokens=40)
    lead.feed(AccessAnswered(access_id(), answer_of(P, 64, (10, 11, 12, 13))))
    post = lead.one(Post)
    assert post.runs.src.tolist() == [96, 608]
    assert post.runs.dst.tolist() == [64, 576]
    assert lead.transfer(pull.id).blocks == 2


def test_each_group_skips_what_it_holds_whole() -> None:
    source = describe("p", 1, pool=hybrid())
    lead = Lead(describe("d", 2, pool=hybrid()))
    lead.admit(source)
    with refused(Reason.BLOCK_COUNT_MISMATCH, InvalidRequest):
        lead.pull(grant(source, tokens=64), 64, (8, 9, 10), (8,), have_tokens=16)
    lead.pull(grant(source, tokens=64), 64, (8, 9, 10), (8, 9), have_tokens=16)
    lead.feed(AccessAnswered(access_id(), answer_of(source, 64, (0, 1, 2, 3), (0, 1))))
    assert lead.one(Post).runs.total_bytes == 5 * 8


def test_a_state_moves_whole_whatever_is_held() -> None:
    pool = hybrid(GroupKind.STATE)
    source, lead = describe("p", 1, pool=pool), Lead(describe("d", 2, pool=pool))
    lead.admit(source)
    token = grant(source, tokens=64)
    with refused(Reason.CONTENT_RANGE, OutOfRange):
        lead.pull(token, 64, use_tokens=32)
    lead.pull(token, 64, (8,), (9,), have_tokens=48)
    lead.feed(AccessAnswered(access_id(), answer_of(source, 64, (0, 1, 2, 3), (5,))))
    assert lead.one(Post).runs.src.tolist() == [24, 512 + 40]


def test_every_rank_moves_its_share_and_the_last_one_settles() -> None:
    source, lead = describe("p", 1, world_size=3), Lead(describe("d", 2, world_size=3))
    lead.admit(source)
    pull = lead.pull(TOKEN, 32, (4, 5))
    opened(lead)
    assert [post.rank for post in lead.seen(Post)] == [0, 1, 2]
    assert lead.transfer(pull.id).nbytes == 96
    for rank in (2, 0):
        assert posted(lead, pull, rank) == []
    posted(lead, pull, 1)
    assert lead.one(SendSettle).settling.nbytes == 96


def test_blocks_are_given_to_the_pull_of_their_own_request_only(lead: Lead) -> None:
    pull = lead.pull(TOKEN)
    before = snapshot(lead.node)
    with refused(Reason.TRANSFER_KEY_MISMATCH, PermissionDenied):
        lead.give(pull.id, (4, 5), key=b"o" * 16)
    assert snapshot(lead.node) == before
    lead.give(pull.id, (4, 5), key=KEY)


# -- other owners


def test_the_engine_is_told_of_its_own_pulls_only(lead: Lead) -> None:
    pull = lead.pull(TOKEN, 32, (4, 5), principal=SCHEDULER)
    opened(lead)
    posted(lead, pull)
    settled(lead)
    assert lead.news() == []
    assert lead.state.transfers.live == 0
    assert lead.transfer(pull.id).state is State.SUCCEEDED


def test_an_access_id_is_drawn_by_the_maker_of_the_event(lead: Lead) -> None:
    with pytest.raises(AssertionError):
        lead.call(lambda c: events.PullBlocks(c, TOKEN, content(32), b"short"))


def test_every_deadline_of_a_pull_is_gone_when_it_is_over(lead: Lead) -> None:
    for number, stage in enumerate(STAGES[1:], 1):
        other = Lead(describe("d", 2))
        other.admit(P)
        pull = at_stage(other, stage)
        cancel(other, transfer_id=pull.id)
        other.feed(CloseAnswered(access_id(), answered=True))
        assert [key for key in Timer if other.state.timers.when(key, pull.id) is not None] == [], number


def test_actions_are_the_events_of_the_other_side(lead: Lead) -> None:
    """The actions of a destination are the events of a source: the two halves of the core fit each other."""
    source = Lead(P)
    source.admit(lead.me)
    token = source.finish().token
    pull = lead.pull(token, 32, (4, 5))
    (row,) = source.opened(lead.me, lead.one(SendOpen).opening)
    lead.feed(AccessAnswered(access_id(), row))
    posted(lead, pull)
    settling = lead.one(SendSettle).settling
    answer = source.call(lambda c: events.SettleAccess(c, "d", 2, (settling,)), principal="d")
    assert isinstance(answer, actions.Verdicts)
    lead.feed(SettleAnswered(access_id(), answer.rows[0]))
    assert lead.transfer(pull.id).state is State.SUCCEEDED
    assert source.state.transfers.counts[State.SUCCEEDED] == 1


def test_a_lease_that_runs_out_while_the_bytes_move_is_found_at_the_settle(lead: Lead) -> None:
    source = Lead(P)
    source.admit(lead.me)
    made = source.finish(ttl_s=5.0)
    pull = lead.pull(made.token, 32, (4, 5))
    (row,) = source.opened(lead.me, lead.one(SendOpen).opening)
    lead.feed(AccessAnswered(access_id(), row))
    source.tick(5.0)
    assert source.transfer(made.transfer.id).state is State.FAILED
    source.finish(key=b"the next request", content=content(32, first=1000))
    posted(lead, pull)
    verdict = source.settle(lead.me)
    lead.feed(SettleAnswered(access_id(), verdict))
    assert failure_of(lead, pull).reason is Reason.LEASE_EXPIRED
    assert failure_of(lead, pull).next is NextStep.RECOMPUTE
    assert [type(news) for news in lead.news()] == [FailedNews, BlocksReturnedNews], "never Received"
