"""KV that does not come: the wait ends, the request goes on as its engine was told, and its blocks are free."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvgrpc.core.policy.values import Give, LoadEnded, ModeChoice, OnLoss, Outcome, SendEnded, TakeLost
from kvgrpc.engine import Engine
from kvgrpc.engine.scheduler import Offer, ScheduledRequest, Source
from kvgrpc.errors import Reason
from tests.engine.conftest import SETTINGS, Attach, Leads
from tests.engine.made import layout
from tests.engine.scheduler.schedulers import COMPLETE, PROMPT, TARGET, At, R, give, same
from tests.engine.support import Lead, new_key, tokens
from tests.service.engines import wait_until

GONE = {Reason.NO_POOL, Reason.INCARNATION_CHANGED}
"""Reasons of a lead whose engine is gone: INCARNATION_CHANGED while the lead remembers it, else NO_POOL."""


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lead]:
    """Yields a lead on which the other side of a push must come soon."""
    lead = Lead(tmp_path_factory.mktemp("hasty"), "H", settings=f"{SETTINGS}registration_timeout_s = 0.4\n")
    try:
        yield lead.wait_ready()
    finally:
        lead.close()


@pytest.mark.parametrize("on_loss", OnLoss)
@pytest.mark.parametrize("source", ["is not known here", "never computes"])
def test_a_push_without_source_is_lost(hasty: Lead, leads: Leads, attach: Attach, on_loss: OnLoss, source: str) -> None:
    p, d = At(attach(leads[0])), At(attach(hasty), on_loss=on_loss)
    take = Source(p.side.engine.address if source == "never computes" else "")
    d.scheduler.arrived(ScheduledRequest(R, PROMPT, transfer_key=new_key(), take=take))
    assert d.load(16) == 24
    ended = d.told(LoadEnded)
    assert ended.loss.reason is Reason.REGISTRATION_TIMEOUT
    assert (ended.tokens, ended.blocks, ended.on_loss) == (16, ((31, 5),), on_loss)
    wait_until(hasty.at_rest)
    assert d.scheduler.match(R, 16).tokens == 0
    assert not d.scheduler.finished(R, PROMPT, TARGET, 16, Outcome.ABORTED).keep
    assert len(d.scheduler.policy) == 0


def test_a_push_whose_destination_does_not_come_gives_its_blocks_back_in_time(hasty: Lead, attach: Attach) -> None:
    p = At(attach(hasty))
    assert not p.prefilled(give(ModeChoice.PUSH))
    assert p.told(SendEnded).loss.reason is Reason.REGISTRATION_TIMEOUT
    assert hasty.at_rest()
    assert len(p.scheduler.policy) == 0


@pytest.mark.parametrize("on_loss", OnLoss)
@pytest.mark.parametrize("heard", ["before blocks are there", "after that"])
@pytest.mark.parametrize("late", ["the offer expired", "the decode engine is gone"])
def test_late_history_is_lost_and_freed(leads: Leads, attach: Attach, on_loss: OnLoss, heard: str, late: str) -> None:
    p, d = At(attach(leads[0]), on_loss=on_loss, recompute_threshold_tokens=16), At(attach(leads[1]))
    expires = late == "the offer expired"
    decoded = ScheduledRequest(
        R, PROMPT, transfer_key=new_key(), give=Give(ModeChoice.PULL, prefill=False), ttl_s=0.2 if expires else None
    )
    offer = Offer(d.prefilled(decoded))
    if expires:
        assert d.told(SendEnded).loss.reason is Reason.LEASE_EXPIRED
    else:
        d.side.close()
        leads[1].wait_no_engine()
    turn, table = [*PROMPT, *tokens(40, seed=6)], [[*range(40, 45)]]
    p.scheduler.arrived(ScheduledRequest(R, turn, transfer_key=new_key(), take=offer, give=Give(ModeChoice.PULL)))
    if heard == "before blocks are there":
        lost = p.told(TakeLost)
        assert lost.on_loss is on_loss
    else:
        p.scheduler.allocated(R, table, 0, p.scheduler.match(R, 0).tokens)
        lost = p.told(LoadEnded)
        assert (lost.tokens, lost.blocks, lost.on_loss) == (0, ((40, 41, 42),), on_loss)
    assert lost.loss.reason in ({Reason.LEASE_EXPIRED} if expires else GONE)
    wait_until(leads[0].at_rest)
    if on_loss is OnLoss.FAIL:
        assert not p.scheduler.finished(R, turn, table, 0, Outcome.ABORTED).keep
    else:
        assert p.scheduler.match(R, 0).tokens == 0
        p.scheduler.allocated(R, table, 0, 0)
        assert p.scheduler.finished(R, turn, table, len(turn), COMPLETE).handed_over
        p.scheduler.aborted(R)
        p.told(SendEnded)
    assert len(p.scheduler.policy) == 0


@pytest.mark.parametrize("known", [False, True], ids=["strangers", "peers"])
def test_an_offer_to_an_unknown_prompt_is_released_by_its_grant(leads: Leads, attach: Attach, *, known: bool) -> None:
    p, d = At(attach(leads[0])), At(attach(leads[1]))
    if known:
        d.scheduler.arrived(ScheduledRequest("before", PROMPT, take=Offer(p.prefilled(give()))))
        d.scheduler.aborted("before")
        d.until(leads[0].at_rest)
        p.told(SendEnded)
    d.scheduler.let_go(ScheduledRequest(R, take=Offer(p.prefilled(give(ttl_s=300.0)))), "its prompt is too long")
    d.scheduler.step()
    p.told(SendEnded)
    wait_until(lambda: leads[0].at_rest() and leads[1].at_rest())


def test_what_another_request_takes_under_the_same_grant_goes_on(leads: Leads, attach: Attach) -> None:
    p, d = At(attach(leads[0])), At(attach(leads[1]))
    offer = Offer(p.prefilled(give()))
    d.scheduler.arrived(ScheduledRequest(R, PROMPT, take=offer))
    d.load()
    d.scheduler.let_go(ScheduledRequest("refused", take=offer), "its prompt is too long")
    d.scheduler.let_go(ScheduledRequest("refused"), "it takes nothing")
    assert d.told(LoadEnded).loss is None


def test_a_lead_of_an_engines_own_is_gone_when_it_was_abandoned() -> None:
    with Engine.launch(pool=layout()) as engine:
        assert not engine.lead_gone
        engine.abandon()
        assert engine.lead_gone


def test_the_end_of_a_pull_is_not_of_a_later_request_of_its_id(leads: Leads, attach: Attach) -> None:
    p, d = At(attach(leads[0])), At(attach(leads[1]))
    first, second = p.prefilled(give()), p.prefilled(replace(give(), request_id="r2"))
    d.scheduler.arrived(ScheduledRequest(R, PROMPT, take=Offer(first)))
    d.scheduler.step()
    assert not d.scheduler.aborted(R).keep
    d.scheduler.arrived(ScheduledRequest(R, PROMPT, take=Offer(second)))
    assert d.load() == 40
    assert d.told(LoadEnded).loss is None
    assert same(p, d)
