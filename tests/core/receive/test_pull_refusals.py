"""Calls for a pull that are wrong are refused, and change nothing."""

from collections.abc import Callable
from typing import Any

import pytest

from kvgrpc.core import events
from kvgrpc.core.actions import ReceivedNews, SendOpen
from kvgrpc.core.events import AccessAnswered, Destination, SettleAnswered
from kvgrpc.core.tables.accesses import Verdict
from kvgrpc.core.values.content import ContentId
from kvgrpc.core.values.grants import AccessKind
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import (
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
from tests.core.nodes import Lead, access_id, answer_of, content, describe, grant, lists, refused, snapshot
from tests.core.receive.pull_stages import TOKEN, P, cancel, opened, posted, settled


@pytest.fixture
def lead() -> Lead:
    """Makes a lead that is connected to P."""
    made = Lead(describe("d", 2))
    made.admit(P)
    return made


REFUSED: dict[str, tuple[Callable[[Lead], Any], Reason, type[KVGrpcError]]] = {
    "no grant": (lambda lead: lead.pull(b"rubbish"), Reason.GRANT_INVALID, InvalidRequest),
    "a WRITE grant": (
        lambda lead: lead.pull(grant(P, access=AccessKind.WRITE)), Reason.GRANT_WRONG_ACCESS, PreconditionFailed
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
    assert lead.news() == [ReceivedNews(pull.id, "", 32)]


def test_an_opaque_content_is_pulled_whole(lead: Lead) -> None:
    lead.pull(TOKEN, content=ContentId(32, opaque=b"x"))
    claim = lead.one(SendOpen).opening.claim
    assert claim is not None
    assert (claim.tokens, claim.opaque) == (32, b"x")
