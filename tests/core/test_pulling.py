"""Pulling, from PullBlocks to the return of the blocks: success has one way, everything else fails closed."""

from collections.abc import Callable
from typing import Any

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.accesses import Verdict
from kvgrpc.core.actions import (
    BlocksReturned,
    Cancelled,
    Dial,
    Failed,
    MakeOffer,
    MapPeer,
    Post,
    PullOpened,
    Received,
    Reply,
    SendClose,
    SendOpen,
    SendSettle,
    TellEngine,
    TransferChanged,
    UnmapPeer,
)
from kvgrpc.core.content import Content
from kvgrpc.core.events import (
    AccessAnswered,
    AllocateBlocks,
    CancelTransfer,
    CloseAnswered,
    Destination,
    EndpointOffered,
    LifeBegan,
    PeerAlive,
    PeerSilent,
    PostingEnded,
    RenewAnswered,
    SettleAnswered,
    StepDone,
    Tick,
)
from kvgrpc.core.grants import Access
from kvgrpc.core.layout import GroupKind, PoolKind
from kvgrpc.core.limits import Limits
from kvgrpc.core.pins import PinKind
from kvgrpc.core.timers import Timer
from kvgrpc.core.transfers import Direction, Disposition, Next, Side, State, Transfer
from kvgrpc.errors import (
    Aborted,
    Exhausted,
    InvalidRequest,
    KVGrpcError,
    NotFound,
    OutOfRange,
    PermissionDenied,
    PreconditionFailed,
    Reason,
    Unavailable,
)
from tests.core.nodes import (
    KEY,
    SECRET,
    Lead,
    access_id,
    answer_of,
    content,
    describe,
    endpoint,
    endpoints,
    full,
    grant,
    hybrid,
    ids,
    key_of,
    lists,
    refused,
    snapshot,
)

P = describe("p", 1)
TOKEN = grant(P)
LOST = Unavailable(Reason.PEER_UNREACHABLE, "no answer")


@pytest.fixture
def lead() -> Lead:
    """A lead that is connected to P."""
    made = Lead(describe("d", 2))
    made.admit(P)
    return made


def failure_of(lead: Lead, transfer: Transfer) -> Any:
    failure = lead.transfer(transfer.id).failure
    assert failure is not None
    return failure


def opened(lead: Lead, number: int = 1, **changes: Any) -> list[Any]:
    return lead.feed(AccessAnswered(access_id(number), answer_of(P, **changes)))


def posted(lead: Lead, transfer: Transfer, rank: int = 0, *, done: bool = True, nbytes: int = 32) -> list[Any]:
    return lead.feed(PostingEnded(f"{transfer.id}/{rank}", done, nbytes, message="" if done else "it broke"))


def settled(lead: Lead, verdict: Verdict | KVGrpcError | None = None, *, retryable: bool = False) -> list[Any]:
    return lead.feed(SettleAnswered(access_id(), verdict or Verdict(True), retryable))


def cancel(lead: Lead, **which: Any) -> Cancelled:
    answer = lead.call(lambda c: CancelTransfer(c, **which))
    assert isinstance(answer, Cancelled)
    return answer


def at_stage(lead: Lead, stage: str) -> Transfer:
    """A pull that has come as far as that."""
    if stage == "connecting":
        lead.begin(describe("d", 3))
    pull = lead.pull(TOKEN, 32, (4, 5)) if stage != "waiting" else lead.pull(TOKEN)
    if stage in ("waiting", "stepping", "wire", "settling"):
        opened(lead)
    if stage == "settling":
        posted(lead, pull)
    return lead.transfer(pull.id)


STAGES = ("connecting", "opening", "waiting", "wire", "settling")


# -- the whole life


def test_the_life_of_a_pull() -> None:
    lead = Lead(describe("d", 2))
    made = lead.pull(TOKEN, 32, (4, 5), request_id="r", priority=3)
    assert (made.direction, made.state, made.memory) == (Direction.RECEIVE, State.PENDING, Disposition.HELD)
    assert (made.waiting_for, made.use_tokens, made.lease_id) == ("handshake", 32, "l-1")
    assert (made.peer_engine_id, made.peer_incarnation, made.peer_address) == ("p", 1, "p:1")
    assert lead.state.pins.has(made.id, PinKind.TARGET)

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
    assert lead.one(SendSettle).settling == events.Settling(access_id(), last=True, nbytes=32)
    assert lead.news() == [], "nothing is offered before the source has vouched for it"

    settled(lead)
    done = lead.transfer(made.id)
    assert (done.state, done.memory, done.nbytes_done) == (State.SUCCEEDED, Disposition.RETURNED, 32)
    assert [phase.name for phase in done.phases] == ["handshake", "open", "queue", "wire", "settle"]
    assert all(phase.end is not None for phase in done.phases)
    assert lead.news() == [Received(made.id, "r", 32)]
    assert [type(action) for action in lead.done] == [TransferChanged, TellEngine], "first ended, then told"
    assert lead.state.bytes_received == 32
    assert (len(lead.state.pins), lead.state.timers.next_deadline()) == (0, None)


def test_the_call_is_answered_before_the_engine_is_told_anything(lead: Lead) -> None:
    lead.pull(grant(describe("x", 9, address="")), 32, (4, 5))
    kinds = [type(action) for action in lead.done]
    assert kinds.index(Reply) < kinds.index(TellEngine)


def test_a_destination_may_come_later(lead: Lead) -> None:
    pull = lead.pull(TOKEN, request_id="r")
    opened(lead)
    assert lead.news() == [PullOpened(pull.id, "r", 32)]
    assert lead.transfer(pull.id).waiting_for == "blocks"
    assert len(lead.state.pins) == 0
    lead.give(pull.id, (4, 5))
    assert lead.one(Post)
    assert lead.state.pins.has(pull.id, PinKind.TARGET)


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
    assert lead.one(SendSettle).settling == events.Settling(access_id(), last=True, nbytes=0)
    settled(lead)
    assert lead.transfer(pull.id).state is State.SUCCEEDED
    assert lead.news() == [Received(pull.id, "", 32)]


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


# -- what is wrong with a call


REFUSED: dict[str, tuple[Callable[[Lead], Any], Reason, type[KVGrpcError]]] = {
    "no grant": (lambda lead: lead.pull(b"rubbish"), Reason.GRANT_INVALID, InvalidRequest),
    "a WRITE grant": (
        lambda lead: lead.pull(grant(P, access=Access.WRITE)), Reason.GRANT_WRONG_ACCESS, PreconditionFailed
    ),
    "another request's": (lambda lead: lead.pull(TOKEN, key=b"o" * 16), Reason.TRANSFER_KEY_MISMATCH, PermissionDenied),
    "no content": (lambda lead: lead.pull(TOKEN, content=None), Reason.CONTENT_REQUIRED, InvalidRequest),
    "too much of it": (lambda lead: lead.pull(TOKEN, 32, use_tokens=48), Reason.CONTENT_RANGE, OutOfRange),
    "within a unit": (lambda lead: lead.pull(TOKEN, 32, use_tokens=17), Reason.CONTENT_RANGE, OutOfRange),
    "prompt too short": (lambda lead: lead.pull(TOKEN, 10), Reason.CONTENT_RANGE, OutOfRange),
    "out of range": (lambda lead: lead.pull(TOKEN, 32, (63, 64)), Reason.BLOCK_OUT_OF_RANGE, OutOfRange),
    "listed twice": (lambda lead: lead.pull(TOKEN, 32, (4, 4)), Reason.BLOCK_DUPLICATE, InvalidRequest),
    "unknown group": (lambda lead: lead.pull(TOKEN, 32, (4, 5), (1,)), Reason.GROUP_MISMATCH, InvalidRequest),
    "too few blocks": (lambda lead: lead.pull(TOKEN, 32, (4,)), Reason.BLOCK_COUNT_MISMATCH, InvalidRequest),
    "too many blocks": (
        lambda lead: lead.pull(TOKEN, 32, (4, 5, 6)), Reason.BLOCK_COUNT_MISMATCH, InvalidRequest
    ),
    "more held than used": (
        lambda lead: lead.pull(TOKEN, 32, (4,), have_tokens=48), Reason.BLOCK_COUNT_MISMATCH, InvalidRequest
    ),
    "less than nothing held": (
        lambda lead: lead.pull(TOKEN, 32, (4, 5), have_tokens=-16), Reason.INVALID_FIELD, InvalidRequest
    ),
    "pinned": (lambda lead: lead.pull(TOKEN, 32, (0, 1)), Reason.BLOCK_PINNED, PreconditionFailed),
    "no queue timeout": (lambda lead: lead.pull(TOKEN, queue_timeout_s=0.0), Reason.INVALID_FIELD, InvalidRequest),
    "no transfer timeout": (
        lambda lead: lead.pull(TOKEN, transfer_timeout_s=-1.0), Reason.INVALID_FIELD, InvalidRequest
    ),
    "cancelled before": (
        lambda lead: lead.pull(grant(P, key=b"cancelled before")), Reason.CANCELLED, PreconditionFailed
    ),
}  # fmt: skip


@pytest.mark.parametrize("validate_only", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_pull_changes_nothing(lead: Lead, name: str, validate_only: bool) -> None:
    make, reason, kind = REFUSED[name]
    lead.finish(16, (1,), key=b"an own hand-over")
    cancel(lead, key=b"cancelled before")
    if validate_only:
        pull = lead.pull
        lead.pull = lambda *args, **fields: pull(*args, validate_only=True, **fields)  # type: ignore[method-assign]
    before = snapshot(lead.node)
    with refused(reason, kind):
        make(lead)
    assert snapshot(lead.node) == before


def test_validate_only_changes_nothing(lead: Lead) -> None:
    before = snapshot(lead.node)
    answer = lead.call(
        lambda c: events.PullBlocks(
            c, TOKEN, content(32), access_id(), 0, Destination(lists((4, 5))), validate_only=True
        )
    )
    assert answer.transfer is None
    assert snapshot(lead.node) == before
    pull = lead.pull(TOKEN)
    opened(lead)
    before = snapshot(lead.node)
    lead.give(pull.id, (4, 5), validate_only=True)
    with refused(Reason.BLOCK_COUNT_MISMATCH):
        lead.give(pull.id, (4, 5, 6), validate_only=True)
    assert snapshot(lead.node) == before


def test_pulls_are_bounded() -> None:
    lead = Lead(describe("d", 2), Limits(transfers=1))
    lead.pull(TOKEN)
    with refused(Reason.QUEUE_FULL, Exhausted):
        lead.pull(TOKEN, number=2)


def test_without_a_pool_there_is_nothing_to_pull_into(lead: Lead) -> None:
    lead.begin(None, attached=False)
    with refused(Reason.NO_POOL, Unavailable):
        lead.pull(TOKEN)


def test_a_managed_pool_pulls_only_into_what_it_gave_out() -> None:
    lead = Lead(describe("d", 2, pool_kind=PoolKind.SERVER_MANAGED))
    with refused(Reason.BLOCK_NOT_ALLOCATED, PreconditionFailed):
        lead.pull(TOKEN, 32, (0, 1))
    lead.call(lambda c: events.AllocateBlocks(c, ((0, 2),)))
    lead.pull(TOKEN, 32, (0, 1))


def test_blocks_are_given_to_a_pull_that_waits_for_them_only(lead: Lead) -> None:
    sent = lead.finish(16, (1,)).transfer
    with refused(Reason.TRANSFER_NOT_FOUND, NotFound):
        lead.give(sent.id, (4, 5))
    with refused(Reason.TRANSFER_NOT_FOUND, NotFound):
        lead.give("t-unknown", (4, 5))
    pull = lead.pull(TOKEN)
    cancel(lead, transfer_id=pull.id, message="enough")
    with pytest.raises(PreconditionFailed, match=r"TRANSFER_ENDED.*enough"):
        lead.give(pull.id, (4, 5))
    pull = lead.pull(TOKEN, number=2, destination=Destination(()))
    opened(lead, 2)
    lead.feed(SettleAnswered(access_id(2), Verdict(True)))
    with refused(Reason.TRANSFER_ENDED):
        lead.give(pull.id, (4, 5))


def test_how_many_tokens_are_used_is_the_engine_s_to_say(lead: Lead) -> None:
    token = grant(P, tokens=64)
    pull = lead.pull(token, 64, (4, 5), use_tokens=32)
    claim = lead.one(SendOpen).opening.claim
    assert claim is not None
    assert (claim.tokens, claim.digest) == (32, content(32).digest(32))
    lead.feed(AccessAnswered(access_id(), answer_of(P, 32, offer_tokens=64)))
    posted(lead, pull)
    settled(lead)
    assert lead.news() == [Received(pull.id, "", 32)]


def test_an_opaque_content_is_pulled_whole(lead: Lead) -> None:
    lead.pull(TOKEN, content=Content(32, opaque=b"x"))
    claim = lead.one(SendOpen).opening.claim
    assert claim is not None
    assert (claim.tokens, claim.opaque) == (32, b"x")


# -- time


def test_waiting_for_its_turn_ends_with_the_queue_timeout_and_names_the_phase() -> None:
    lead = Lead(describe("d", 2), Limits(connect_timeout_s=100.0))
    pull = lead.pull(TOKEN, 32, (4, 5), queue_timeout_s=7.0)
    lead.tick(7.0)
    failure = failure_of(lead, pull)
    assert (failure.reason, failure.phase, failure.side) == (Reason.QUEUE_TIMEOUT, "handshake", Side.DESTINATION)
    assert "handshake" in failure.message
    assert failure.next is Next.RETRY_HERE
    assert lead.transfer(pull.id).memory is Disposition.RETURNED


@pytest.mark.parametrize(("stage", "after_s", "reason"), [
    ("opening", 30.0, Reason.QUEUE_TIMEOUT),
    ("wire", 30.0, Reason.TRANSFER_TIMEOUT),
    ("settling", 5.0, Reason.SETTLE_TIMEOUT),
    ("waiting", 600.0, Reason.QUEUE_TIMEOUT),
])  # fmt: skip
def test_every_wait_ends(lead: Lead, stage: str, after_s: float, reason: Reason) -> None:
    pull = at_stage(lead, stage)
    lead.tick(after_s - 0.001)
    assert not lead.transfer(pull.id).over
    lead.tick(0.001)
    assert failure_of(lead, pull).reason is reason


def test_a_timeout_is_clamped_to_the_cap(lead: Lead) -> None:
    pull = lead.pull(TOKEN, 32, (4, 5), queue_timeout_s=1e9)
    lead.tick(600.0)
    assert failure_of(lead, pull).reason is Reason.QUEUE_TIMEOUT


def test_the_queue_timeout_starts_anew_when_the_blocks_are_there(lead: Lead) -> None:
    pull = lead.pull(TOKEN, queue_timeout_s=7.0)
    opened(lead)
    lead.tick(100.0)
    lead.give(pull.id, (4, 5), after_step=3)
    assert lead.transfer(pull.id).waiting_for == "step"
    lead.tick(6.9)
    assert not lead.transfer(pull.id).over
    lead.tick(0.1)
    assert failure_of(lead, pull).reason is Reason.QUEUE_TIMEOUT


def test_the_bytes_have_the_time_that_was_asked_for(lead: Lead) -> None:
    pull = lead.pull(TOKEN, 32, (4, 5), transfer_timeout_s=2.0)
    opened(lead)
    lead.tick(2.0)
    assert failure_of(lead, pull).reason is Reason.TRANSFER_TIMEOUT


# -- steps


def test_a_pull_waits_for_the_step_that_touches_its_blocks_last(lead: Lead) -> None:
    pull = lead.pull(TOKEN, 32, (4, 5), after_step=3)
    opened(lead)
    assert lead.transfer(pull.id).waiting_for == "step"
    lead.feed(StepDone(0, 2))
    assert lead.seen(Post) == []
    lead.feed(StepDone(0, 4))
    assert lead.one(Post)


def test_a_step_that_is_over_is_not_waited_for(lead: Lead) -> None:
    lead.feed(StepDone(0, 9))
    lead.pull(TOKEN, 32, (4, 5), after_step=9)
    opened(lead)
    assert lead.one(Post)


def test_a_pull_that_ended_while_it_waited_for_a_step_posts_nothing(lead: Lead) -> None:
    pull = lead.pull(TOKEN, 32, (4, 5), after_step=3)
    opened(lead)
    cancel(lead, transfer_id=pull.id)
    lead.feed(StepDone(0, 3))
    assert lead.seen(Post) == []


# -- what the source says


@pytest.mark.parametrize("error", [
    PreconditionFailed(Reason.CONTENT_MISMATCH, "other tokens"),
    PreconditionFailed(Reason.LEASE_EXPIRED, "too late"),
    Aborted(Reason.INCARNATION_CHANGED, "it restarted"),
    PermissionDenied(Reason.GRANT_INVALID, "forged"),
], ids=lambda error: error.reason.value)  # fmt: skip
def test_a_refused_opening_fails_the_pull_and_returns_its_blocks(lead: Lead, error: KVGrpcError) -> None:
    pull = lead.pull(TOKEN, 32, (4, 5))
    lead.feed(AccessAnswered(access_id(), error))
    failure = failure_of(lead, pull)
    assert (failure.reason, failure.phase, failure.side) == (error.reason, "open", Side.SOURCE)
    assert [type(news) for news in lead.news()] == [Failed, BlocksReturned]
    assert len(lead.state.pins) == 0


def test_an_opening_without_an_answer_is_tried_again(lead: Lead) -> None:
    lead.pull(TOKEN, 32, (4, 5))
    first = lead.one(SendOpen)
    lead.feed(AccessAnswered(access_id(), LOST, retryable=True))
    assert lead.tick(0.19) == []
    lead.tick(0.02)
    assert lead.one(SendOpen) == first
    opened(lead)
    assert lead.one(Post)


def test_an_answer_that_comes_twice_is_heard_once(lead: Lead) -> None:
    pull = lead.pull(TOKEN, 32, (4, 5))
    opened(lead)
    assert opened(lead) == []
    assert lead.feed(AccessAnswered(access_id(), LOST)) == []
    posted(lead, pull)
    settled(lead)
    assert settled(lead, Verdict(False, Reason.LEASE_EXPIRED)) == []
    assert lead.transfer(pull.id).state is State.SUCCEEDED


def test_a_retry_that_was_planned_dies_with_its_reason(lead: Lead) -> None:
    lead.pull(TOKEN, 32, (4, 5))
    lead.feed(AccessAnswered(access_id(), LOST, retryable=True))
    lead.feed(AccessAnswered(access_id(), PreconditionFailed(Reason.NO_HANDSHAKE, "who?")))
    lead.tick(0.2)
    assert lead.seen(SendOpen) == []
    lead.pull(TOKEN, 32, (6, 7), number=2)
    lead.feed(AccessAnswered(access_id(2), LOST, retryable=True))
    opened(lead, 2)
    lead.tick(0.2)
    assert lead.seen(SendOpen) == []


def test_a_source_that_does_not_know_us_is_introduced_again(lead: Lead) -> None:
    pull = lead.pull(TOKEN, 32, (4, 5))
    lead.feed(AccessAnswered(access_id(), PreconditionFailed(Reason.NO_HANDSHAKE, "who?")))
    assert lead.transfer(pull.id).waiting_for == "handshake"
    assert lead.one(MakeOffer)
    lead.connect(P)
    assert lead.one(SendOpen).opening.access_id == access_id()
    opened(lead)
    assert lead.one(Post)
    phases = [phase.name for phase in lead.transfer(pull.id).phases]
    assert phases == ["handshake", "open", "handshake", "open", "queue", "wire"]


def test_a_source_that_never_knows_us_is_given_up_after_the_queue_timeout(lead: Lead) -> None:
    pull = lead.pull(TOKEN, 32, (4, 5), queue_timeout_s=5.0)
    for _ in range(9):
        lead.feed(AccessAnswered(access_id(), PreconditionFailed(Reason.NO_HANDSHAKE, "who?")), 1.0)
        if lead.transfer(pull.id).over:
            break
        lead.connect(P)
    assert failure_of(lead, pull).reason is Reason.QUEUE_TIMEOUT


@pytest.mark.parametrize(("changes", "complaint"), [
    ({"token_count": 48}, "48 tokens"),
    ({"blocks": ()}, "every group"),
    ({"blocks": lists((0, 1), (0,))}, "every group"),
    ({"blocks": ((1, ids(0, 1)),)}, "every group"),
    ({"blocks": lists((0,))}, "1 blocks"),
    ({"blocks": lists((0, 64))}, "does not exist"),
    ({"blocks": lists((3, 3))}, "twice"),
    ({"ttl_s": 0.0}, "no time"),
    ({"ttl_s": float("nan")}, "no time"),
    ({"remaining_s": -1.0}, "no time"),
    ({"remaining_s": float("nan")}, "no time"),
], ids=str)  # fmt: skip
def test_an_answer_that_makes_no_sense_fails_the_pull(lead: Lead, changes: dict[str, Any], complaint: str) -> None:
    pull = lead.pull(TOKEN, 32, (4, 5))
    opened(lead, **changes)
    failure = failure_of(lead, pull)
    assert failure.reason is Reason.PEER_FAILED
    assert complaint in failure.message
    assert lead.one(SendClose).closing.access_id == access_id()


def test_memory_of_another_generation_than_was_mapped_is_not_read(lead: Lead) -> None:
    pull = lead.pull(TOKEN, 32, (4, 5))
    opened(lead, memory_generation=1)
    assert failure_of(lead, pull).reason is Reason.MEMORY_CHANGED
    lead.pull(TOKEN, 32, (4, 5), number=2)
    assert lead.one(MakeOffer), "the next pull shakes hands first"


def test_a_grant_without_an_address_works_for_a_peer_that_dialled_us_only(lead: Lead) -> None:
    hidden = describe("p", 1, address="")
    lead.pull(grant(hidden), 32, (4, 5))
    assert lead.seen(SendOpen)
    pull = lead.pull(grant(describe("x", 9, address="")), 32, (6, 7), number=2)
    assert failure_of(lead, pull).reason is Reason.PEER_UNREACHABLE
    assert lead.seen(Dial) == []
    assert lead.seen(MakeOffer) == []


# -- ranks


def test_a_broken_posting_fails_the_pull_and_names_the_rank() -> None:
    source, lead = describe("p", 1, world_size=2), Lead(describe("d", 2, world_size=2))
    lead.admit(source)
    pull = lead.pull(TOKEN, 32, (4, 5))
    opened(lead)
    posted(lead, pull, 1, done=False)
    failure = failure_of(lead, pull)
    assert (failure.reason, failure.rank, failure.phase) == (Reason.DATA_PATH_FAILED, 1, "wire")
    assert lead.transfer(pull.id).memory is Disposition.QUARANTINED, "rank 0 may still write"
    assert [type(news) for news in lead.news()] == [Failed]
    posted(lead, pull, 0)
    assert lead.transfer(pull.id).memory is Disposition.RETURNED
    assert lead.news() == [BlocksReturned(pull.id, "")]
    assert lead.transfer(pull.id).failure == failure


def test_blocks_stay_in_quarantine_until_the_last_posting_ended(lead: Lead) -> None:
    pull = at_stage(lead, "wire")
    lead.tick(30.0)
    assert (lead.transfer(pull.id).state, lead.transfer(pull.id).memory) == (State.FAILED, Disposition.QUARANTINED)
    assert lead.state.pins.has(pull.id, PinKind.QUARANTINE)
    with refused(Reason.BLOCK_PINNED):
        lead.pull(TOKEN, 32, (5, 6), number=2)
    with refused(Reason.BLOCK_PINNED):
        lead.finish(16, (4,))
    lead.tick(1e6)
    assert lead.transfer(pull.id).memory is Disposition.QUARANTINED, "no timeout proves anything"
    posted(lead, pull)
    assert lead.transfer(pull.id).memory is Disposition.RETURNED
    assert len(lead.state.pins) == 0


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
def test_a_posting_of_which_nobody_knows_whether_it_is_at_rest_keeps_its_blocks(lead: Lead, done: bool) -> None:
    pull = at_stage(lead, "wire")
    lost = PostingEnded(f"{pull.id}/0", done, message="the transport broke", quiesced=False)
    lead.feed(lost)
    assert failure_of(lead, pull).reason is Reason.DATA_PATH_FAILED
    assert failure_of(lead, pull).rank == 0
    assert lead.transfer(pull.id).memory is Disposition.QUARANTINED
    assert [type(news) for news in lead.news()] == [Failed]
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
    lead.feed(PostingEnded(f"{pull.id}/1", done=False, message="the transport broke", quiesced=False))
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
    lead.feed(PostingEnded(f"{pulls[0].id}/0", done=False, quiesced=False))
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
    assert lead.state.quarantine_full() == "", "two of eight is all that may be"
    cancel(lead, transfer_id=pulls[1].id)
    assert "4 of 8 blocks of group 0" in lead.state.quarantine_full()
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
    assert lead.state.quarantine_full() == ""
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
    """A pull whose access is open and which waits for blocks, while a posting from the same peer breaks."""
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
    lead.connect(describe("p", 9))
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
    lead.feed(events.PeerMapped(1, key_of(source), "shm", ""))
    assert len(maps) == 2
    assert lead.one(SendOpen).opening.access_id == access_id(9)


def test_blocks_in_quarantine_outlive_the_source_and_our_life() -> None:
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


# -- settling


@pytest.mark.parametrize(
    "reason", [Reason.LEASE_EXPIRED, Reason.LEASE_VOIDED, Reason.MEMORY_CHANGED, Reason.ACCESS_NOT_FOUND]
)
def test_a_stale_settle_fails_and_the_bytes_are_never_offered(lead: Lead, reason: Reason) -> None:
    pull = at_stage(lead, "settling")
    settled(lead, Verdict(False, reason, "why"))
    failure = failure_of(lead, pull)
    assert (failure.reason, failure.phase, failure.message) == (reason, "settle", "why")
    assert [type(news) for news in lead.news()] == [Failed, BlocksReturned]
    assert lead.seen(SendClose) == [], "the settle has closed it"


def test_a_verdict_without_a_reason_is_a_failure_of_the_peer(lead: Lead) -> None:
    pull = at_stage(lead, "settling")
    settled(lead, Verdict(False))
    assert failure_of(lead, pull).reason is Reason.PEER_FAILED


def test_a_lost_settle_is_asked_again(lead: Lead) -> None:
    pull = at_stage(lead, "settling")
    first = lead.one(SendSettle)
    settled(lead, LOST, retryable=True)
    lead.tick(0.2)
    assert lead.one(SendSettle) == first
    settled(lead)
    assert lead.transfer(pull.id).state is State.SUCCEEDED


def test_no_answer_counts_as_failure(lead: Lead) -> None:
    pull = at_stage(lead, "settling")
    for _ in range(40):
        settled(lead, LOST, retryable=True)
        lead.tick(0.2)
    assert failure_of(lead, pull).reason is Reason.SETTLE_TIMEOUT
    assert Received not in [type(news) for news in lead.news()]


def test_a_settle_that_is_refused_fails(lead: Lead) -> None:
    pull = at_stage(lead, "settling")
    settled(lead, InvalidRequest(Reason.INVALID_FIELD, "what?"))
    assert failure_of(lead, pull).reason is Reason.INVALID_FIELD


def test_a_source_that_does_not_know_us_when_we_settle_vouches_for_nothing(lead: Lead) -> None:
    pull = at_stage(lead, "settling")
    settled(lead, PreconditionFailed(Reason.NO_HANDSHAKE, "who?"))
    assert failure_of(lead, pull).reason is Reason.INCARNATION_CHANGED
    assert lead.seen(SendClose) == []
    lead.pull(TOKEN, 32, (4, 5), number=2)
    assert lead.one(MakeOffer), "the next pull shakes hands first"


# -- the source is lost


@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_dead_source_fails_the_pull_at_every_stage(lead: Lead, stage: str) -> None:
    pull = at_stage(lead, stage)
    lead.feed(PeerSilent(key_of(P)))
    for _ in range(30):
        lead.tick(1.0)
        if stage == "settling" and not lead.transfer(pull.id).over:
            settled(lead, LOST, retryable=True)
        if lead.transfer(pull.id).over:
            break
    reason = Reason.SETTLE_TIMEOUT if stage == "settling" else Reason.PEER_LOST
    assert failure_of(lead, pull).reason is reason
    at_rest = Disposition.QUARANTINED if stage == "wire" else Disposition.RETURNED
    assert lead.transfer(pull.id).memory is at_rest


def test_what_a_dead_source_holds_is_closed_when_it_comes_back(lead: Lead) -> None:
    at_stage(lead, "wire")
    lead.feed(PeerSilent(key_of(P)))
    lead.tick(10.0)
    assert lead.seen(SendClose) == []
    call = lead.ask(lambda c: events.HandshakeReceived(c, P, endpoints(P)), principal="p")
    assert lead.one(SendClose).closing.access_id == access_id()
    assert call


def test_silence_shorter_than_the_grace_changes_nothing(lead: Lead) -> None:
    pull = at_stage(lead, "wire")
    lead.feed(PeerSilent(key_of(P)))
    lead.feed(PeerAlive(key_of(P)), 9.0)
    posted(lead, pull)
    settled(lead)
    assert lead.transfer(pull.id).state is State.SUCCEEDED


@pytest.mark.parametrize("reason", [Reason.LEASE_EXPIRED, Reason.LEASE_NOT_FOUND, Reason.INCARNATION_CHANGED])
def test_a_lease_that_ends_fails_a_pull_that_waits_at_once(lead: Lead, reason: Reason) -> None:
    pull = at_stage(lead, "waiting")
    lead.feed(RenewAnswered(pull.id, PreconditionFailed(reason, "gone")))
    assert failure_of(lead, pull).reason is reason


@pytest.mark.parametrize("stage", ["opening", "wire", "settling"])
def test_while_it_reads_settle_tells_and_no_renewal_does(lead: Lead, stage: str) -> None:
    pull = at_stage(lead, stage)
    assert lead.feed(RenewAnswered(pull.id, PreconditionFailed(Reason.LEASE_EXPIRED, "gone"))) == []
    assert not lead.transfer(pull.id).over


def test_a_renewal_that_was_lost_or_went_well_changes_nothing(lead: Lead) -> None:
    pull = at_stage(lead, "waiting")
    for error in (None, LOST):
        assert lead.feed(RenewAnswered(pull.id, error)) == []
    assert lead.feed(RenewAnswered("t-unknown", LOST)) == []


# -- cancel


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("by_key", [False, True])
def test_a_pull_is_cancelled_at_every_stage(lead: Lead, stage: str, by_key: bool) -> None:
    pull = at_stage(lead, stage)
    answer = cancel(lead, key=KEY) if by_key else cancel(lead, transfer_id=pull.id)
    in_flight = stage == "wire"
    assert answer.outcome == ("cancelled_in_flight" if in_flight else "cancelled_before_access")
    (after,) = answer.transfers
    assert after.state is State.CANCELLED
    assert after.memory is (Disposition.QUARANTINED if in_flight else Disposition.RETURNED)
    assert failure_of(lead, pull).reason is Reason.CANCELLED
    kinds = [type(news) for news in lead.news()]
    assert kinds == ([Failed] if in_flight else [Failed, BlocksReturned])
    closings = [send.closing for send in lead.seen(SendClose)]
    if stage == "connecting":
        assert closings == []
    else:
        closing = events.Closing(access_id(), True, not in_flight, TOKEN, "cancelled")
        assert closings == [closing]


@pytest.mark.parametrize("stage", STAGES)
def test_answers_that_come_after_a_cancel_change_nothing(lead: Lead, stage: str) -> None:
    pull = at_stage(lead, stage)
    cancel(lead, transfer_id=pull.id)
    after = lead.transfer(pull.id)
    opened(lead)
    settled(lead)
    lead.feed(RenewAnswered(pull.id, LOST))
    assert lead.transfer(pull.id) == after
    assert Received not in [type(news) for news in lead.news()]
    lead.feed(CloseAnswered(access_id(), answered=True))
    posted(lead, pull)
    assert lead.transfer(pull.id).memory is Disposition.RETURNED
    assert lead.transfer(pull.id).failure == after.failure


def test_cancelling_what_is_over_says_so(lead: Lead) -> None:
    pull = at_stage(lead, "settling")
    settled(lead)
    for which in ({"transfer_id": pull.id}, {"key": KEY}):
        answer = cancel(lead, **which)
        assert answer.outcome == "already_ended"
        assert [t.state for t in answer.transfers] == [State.SUCCEEDED]


# -- the end of our own life


@pytest.mark.parametrize("stage", STAGES)
def test_the_end_of_our_life_fails_every_pull_and_closes_its_access(lead: Lead, stage: str) -> None:
    at_stage(lead, stage)
    incarnation = lead.me.incarnation
    done = lead.feed(LifeBegan(77, SECRET, describe("d", 77), engine_attached=True))
    (change,) = [action.transfer for action in done if isinstance(action, TransferChanged)]
    assert change.state is State.FAILED
    assert change.failure is not None
    assert change.failure.reason is Reason.ENGINE_LOST
    assert change.memory is (Disposition.QUARANTINED if stage == "wire" else Disposition.RETURNED)
    closings = [action for action in done if isinstance(action, SendClose)]
    assert [(send.closing.dropped, send.incarnation) for send in closings] == (
        [] if stage == "connecting" else [(True, incarnation)]
    )
    assert lead.seen(TellEngine) == [], "the engine that asked is gone"
    assert (len(lead.state.pins), lead.state.timers.next_deadline()) == (0, None)
    for event in (PostingEnded(f"{change.id}/0", True), SettleAnswered(access_id(), Verdict(True)), Tick()):
        assert lead.feed(event) == []


# -- other owners


def test_the_engine_is_told_of_its_own_pulls_only(lead: Lead) -> None:
    pull = lead.pull(TOKEN, 32, (4, 5), principal="router")
    opened(lead)
    posted(lead, pull)
    settled(lead)
    assert lead.news() == []
    assert lead.state.transfers.live == 0
    assert lead.transfer(pull.id).state is State.SUCCEEDED


def test_an_access_id_is_drawn_by_whoever_makes_the_event(lead: Lead) -> None:
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
    """What a destination sends is what a source takes: the two halves of the core fit each other."""
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
    assert failure_of(lead, pull).next is Next.RECOMPUTE
    assert [type(news) for news in lead.news()] == [Failed, BlocksReturned], "never Received"
