"""Losses, aborts and refusals on two real engines: the request's other side is told, and nothing stays pinned."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvgrpc.core.policy.values import Give, LoadEnded, ModeChoice, OnLoss, Outcome, SendEnded, TakeLost
from kvgrpc.core.tables import transfers
from kvgrpc.core.values import grants
from kvgrpc.engine.scheduler import Offer, ScheduledRequest, Source
from kvgrpc.errors import AlreadyExists, InvalidRequest, PreconditionFailed, Reason
from tests.engine.conftest import Leads
from tests.engine.scheduler.schedulers import PROMPT, TABLE, At, R, give, same
from tests.engine.support import Side, new_key, refused, tokens
from tests.service.engines import wait_until

ELSEWHERE = grants.Claims(
    grants.AccessKind.WRITE, "D", 1, "127.0.0.1:1", "l-1", b"k" * 16, 30.0, block_count=3, token_count=40
)


@pytest.fixture
def sides(pair: tuple[Side, Side]) -> tuple[At, At]:
    """Returns P and D."""
    return At(pair[0]), At(pair[1])


def test_kv_of_other_tokens_is_a_loss_and_names_its_blocks(sides: tuple[At, At]) -> None:
    p, d = sides
    grant = p.prefilled(give())
    d.scheduler.arrived(ScheduledRequest(R, tokens(40, seed=7), take=Offer(grant)))
    d.load()
    ended = d.told(LoadEnded)
    assert ended.loss.reason is Reason.CONTENT_MISMATCH
    assert (ended.loss.phase, ended.loss.side, ended.loss.rank) == ("open", transfers.Side.SOURCE, None)
    assert (ended.tokens, ended.blocks) == (0, ((30, 31, 5),))


def test_what_cannot_be_had_any_more_is_computed_here(pair: tuple[Side, Side]) -> None:
    p, d = At(pair[0]), At(pair[1], on_loss=OnLoss.RECOMPUTE)
    grant = p.prefilled(give())
    p.scheduler.aborted(R)
    assert p.told(SendEnded).loss.reason is Reason.CANCELLED
    d.scheduler.arrived(ScheduledRequest(R, PROMPT, take=Offer(grant)))
    assert isinstance(d.told(TakeLost), TakeLost)
    assert d.scheduler.match(R, 0).tokens == 0


@pytest.mark.parametrize("when", ["arrived", "allocated"])
def test_an_abort_ends_the_pull_and_frees_both_sides(sides: tuple[At, At], when: str) -> None:
    p, d = sides
    d.scheduler.arrived(ScheduledRequest(R, PROMPT, take=Offer(p.prefilled(give()))))
    if when == "allocated":
        d.load()
    assert d.scheduler.aborted(R).keep is (when == "allocated")
    if when == "allocated":
        d.told(LoadEnded)
    d.until(p.side.lead.at_rest)
    p.told(SendEnded)
    wait_until(lambda: p.side.lead.at_rest() and d.side.lead.at_rest())


def test_a_prefill_that_fails_tells_the_destination_of_its_push(sides: tuple[At, At]) -> None:
    p, d = sides
    key = new_key()
    d.scheduler.arrived(ScheduledRequest(R, PROMPT, transfer_key=key, take=Source(p.side.engine.address)))
    d.load()
    d.scheduler.step()
    p.scheduler.arrived(ScheduledRequest(R, PROMPT, transfer_key=key, give=Give(ModeChoice.PUSH)))
    assert not p.scheduler.finished(R, PROMPT, TABLE, 16, Outcome.ABORTED).keep
    p.scheduler.step()
    assert d.told(LoadEnded).loss.reason is Reason.SOURCE_FAILED


@pytest.mark.parametrize("first", ["P", "D"])
def test_the_destination_of_a_push_learns_that_its_prefill_was_not_let_in(sides: tuple[At, At], first: str) -> None:
    p, d = sides
    key = new_key()
    refused = ScheduledRequest(R, PROMPT, transfer_key=key, give=Give(ModeChoice.PUSH))
    if first == "P":
        p.scheduler.refused(refused, "it has no name")
        p.scheduler.step()
    d.scheduler.arrived(ScheduledRequest(R, PROMPT, transfer_key=key, take=Source(p.side.engine.address)))
    d.load()
    d.scheduler.step()
    if first == "D":
        p.scheduler.refused(refused, "it has no name")
        p.scheduler.step()
    lost = d.told(LoadEnded).loss
    assert lost.reason is Reason.SOURCE_FAILED
    assert "it has no name" in lost.message


@pytest.mark.parametrize("wrong", [{"firm_ttl_s": -1.0}, {"consumers": 2000}, {"ttl_s": 0.0}], ids="".join)
def test_a_push_that_would_be_refused_later_is_refused_on_arrival_and_its_destination_hears_of_it(
    sides: tuple[At, At], wrong: dict[str, Any]
) -> None:
    p, d = sides
    key = new_key()
    d.scheduler.arrived(ScheduledRequest(R, PROMPT, transfer_key=key, take=Source(p.side.engine.address)))
    d.load()
    d.scheduler.step()
    push = ScheduledRequest(R, PROMPT, transfer_key=key, give=Give(ModeChoice.PUSH), **wrong)
    with pytest.raises(InvalidRequest) as refusal:
        p.scheduler.arrived(push)
    assert len(p.scheduler.policy) == 0
    p.scheduler.refused(push, refusal.value.sentence)
    p.scheduler.step()
    assert d.told(LoadEnded).loss.reason is Reason.SOURCE_FAILED


def test_a_refusal_that_no_request_waits_for_is_not_reported(sides: tuple[At, At]) -> None:
    p, _ = sides
    p.scheduler.refused(
        ScheduledRequest(R, PROMPT, transfer_key=b"short", give=Give(ModeChoice.PUSH)), "its key is too short"
    )
    p.scheduler.refused(give(), "a pull has a grant, or none")
    p.scheduler.refused(ScheduledRequest(R, PROMPT, take=Offer(b"nonsense")), "no grant")
    assert p.scheduler.step() == []
    assert p.side.lead.at_rest()


KEY = new_key()
FIRST = ScheduledRequest(
    R, PROMPT, transfer_key=KEY, give=Give(ModeChoice.PULL), traceparent=f"00-{'1' * 32}-{'2' * 16}-01"
)


@pytest.mark.parametrize("when", ["computes", "has left"])
@pytest.mark.parametrize(
    "other",
    [
        {"prompt": tokens(40, seed=7)},
        {"adapter": "another"},
        {"cache_salt": "another tenant's"},
        {"transfer_key": new_key()},
        {"give": Give(ModeChoice.PUSH)},
        {"target": grants.mint(ELSEWHERE, b"x" * 32)},
        {"consumers": 2},
        {"on_abort": grants.OnAbort.KEEP},
        {"ttl_s": 1.0},
        {"priority": 1},
        {"label": "another"},
    ],
    ids="".join,
)
def test_another_request_under_a_known_id_is_refused(sides: tuple[At, At], other: dict[str, Any], when: str) -> None:
    p, d = sides
    p.scheduler.arrived(FIRST)
    grant = p.prefilled(FIRST) if when == "has left" else b""
    with refused(Reason.TRANSFER_EXISTS, AlreadyExists):
        p.scheduler.arrived(replace(FIRST, **other))
    p.scheduler.refused(replace(FIRST, give=Give(ModeChoice.PUSH)), "of a push under the first one's key")
    same_ids: Any = np.array(PROMPT)
    assert p.scheduler.arrived(replace(FIRST, prompt=same_ids, traceparent="")).one_token
    grant = grant or p.prefilled(FIRST)
    assert p.scheduler.grant(R) == grant
    d.scheduler.arrived(ScheduledRequest(R, PROMPT, take=Offer(grant)))
    assert d.load() == 40
    assert d.told(LoadEnded).loss is None
    assert same(p, d)
    assert p.told(SendEnded).loss is None


def test_a_prompt_that_its_owner_goes_on_writing_to_stays_what_it_was(sides: tuple[At, At]) -> None:
    p, _ = sides
    prompt = list(PROMPT)
    p.scheduler.arrived(replace(FIRST, prompt=prompt))
    prompt[0] += 1
    with refused(Reason.TRANSFER_EXISTS, AlreadyExists):
        p.scheduler.arrived(replace(FIRST, prompt=prompt))
    p.scheduler.aborted(R)


def test_what_a_request_brings_is_checked_first(leads: Leads, sides: tuple[At, At]) -> None:
    p, d = sides
    grant = p.prefilled(give())
    for wrong, reason, kind in (
        (ScheduledRequest("x", PROMPT, take=Offer(b"nonsense")), Reason.GRANT_INVALID, InvalidRequest),
        (
            ScheduledRequest("x", PROMPT, take=Source("127.0.0.1:1"), transfer_key=b"short"),
            Reason.INVALID_FIELD,
            InvalidRequest,
        ),
        (ScheduledRequest("x", PROMPT, give=Give(ModeChoice.PULL)), Reason.INVALID_FIELD, InvalidRequest),
        (give(ModeChoice.PUSH, target=grant), Reason.GRANT_WRONG_ACCESS, PreconditionFailed),
    ):
        with refused(reason, kind):
            d.scheduler.arrived(wrong)
    assert len(d.scheduler.policy) == 0
    p.scheduler.aborted(R)
    p.told(SendEnded)
