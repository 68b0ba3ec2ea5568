"""Prefills of mode AUTO on two real engines: the KV arrives whichever side comes first."""

import pytest

from kvgrpc.core.policy.values import LoadEnded, ModeChoice, Outcome, SendEnded
from kvgrpc.engine.scheduler import Offer, ScheduledRequest, Source
from kvgrpc.errors import Reason
from tests.engine.conftest import Attach, Leads
from tests.engine.scheduler.schedulers import PROMPT, TABLE, At, R, give, same
from tests.engine.support import new_key
from tests.service.engines import wait_until

Sides = tuple[At, At]


@pytest.fixture
def sides(leads: Leads, attach: Attach) -> Sides:
    """Returns P, which expects pushes, and D."""
    return At(attach(leads[0], expects_pushes=True)), At(attach(leads[1]))


def waiting(d: At, p: At, key: bytes) -> None:
    """Sends a request that waits for KV to be pushed."""
    d.scheduler.arrived(ScheduledRequest(R, PROMPT, transfer_key=key, take=Source(p.side.engine.address)))
    assert d.load() == len(PROMPT)
    d.scheduler.step()


def received(p: At, d: At) -> None:
    p.scheduler.step()
    assert d.told(LoadEnded).loss is None
    assert p.told(SendEnded).loss is None
    assert same(p, d)
    wait_until(lambda: p.side.lead.at_rest() and d.side.lead.at_rest())


def test_who_comes_with_the_grant_pulls(sides: Sides) -> None:
    p, d = sides
    d.scheduler.arrived(ScheduledRequest(R, PROMPT, take=Offer(p.prefilled(give(ModeChoice.AUTO)))))
    d.load()
    received(p, d)


def test_what_has_finished_is_pushed_to_who_comes_with_the_address_alone(sides: Sides) -> None:
    p, d = sides
    wanted = give(ModeChoice.AUTO)
    assert p.prefilled(wanted)
    waiting(d, p, wanted.transfer_key)
    received(p, d)


@pytest.mark.parametrize("first", ["P", "D"])
def test_a_prefill_goes_part_by_part_from_when_its_destination_has_come(sides: Sides, first: str) -> None:
    p, d = sides
    wanted = give(ModeChoice.AUTO)
    if first == "D":
        waiting(d, p, wanted.transfer_key)
    p.scheduler.arrived(wanted)
    p.scheduler.allocated(R, TABLE, 0, 0)
    if first == "P":
        waiting(d, p, wanted.transfer_key)
    p.until(lambda: p.scheduler.policy.pushes(R))
    p.side.fill(TABLE[0], 1)
    p.scheduler.computed(R, TABLE, 32, 1)
    p.side.engine.step_done(1)
    assert p.scheduler.push_key(R) == wanted.transfer_key
    assert not p.scheduler.grant(R)
    assert p.scheduler.finished(R, PROMPT, TABLE, len(PROMPT), Outcome.COMPLETE).handed_over
    assert p.scheduler.push_key(R) == wanted.transfer_key
    received(p, d)


def test_a_destination_waits_for_a_request_that_is_computed_for_long(sides: Sides) -> None:
    """Its reservation outlasts that of a request which the source's engine does not know."""
    p, d = sides
    wanted = give(ModeChoice.AUTO)
    p.scheduler.arrived(wanted)
    waiting(d, p, wanted.transfer_key)
    p.until(lambda: p.scheduler.policy.pushes(R))
    part, source = wanted.content(PROMPT[:16]), p.side.engine.address
    unknown = d.side.engine.reserve([[40]], part, transfer_key=new_key(), source_address=source)
    d.until(lambda: unknown.over)
    assert p.prefilled(wanted) == b""
    received(p, d)


def test_a_destination_hears_that_the_prefill_did_not_finish(sides: Sides) -> None:
    p, d = sides
    wanted = give(ModeChoice.AUTO)
    p.scheduler.arrived(wanted)
    assert not p.scheduler.finished(R, PROMPT, TABLE, 16, Outcome.ABORTED).keep
    p.scheduler.step()
    waiting(d, p, wanted.transfer_key)
    assert d.told(LoadEnded).loss.reason is Reason.SOURCE_FAILED


@pytest.mark.parametrize("end", ["does not finish", "is reset"])
def test_a_destination_that_was_told_to_wait_hears_that_what_would_be_pulled_is_not_there(
    sides: Sides, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = sides
    request, asked = give(ModeChoice.PULL), list[str]()
    known = p.scheduler.wanted

    def wanted(request_id: str) -> bool:
        asked.append(request_id)
        return known(request_id)

    monkeypatch.setattr(p.scheduler, "wanted", wanted)
    p.scheduler.arrived(request)
    waiting(d, p, request.transfer_key)
    p.until(lambda: asked == [R])
    p.scheduler.step()
    if end == "is reset":
        p.scheduler.aborted(R, "the engine's cache was reset")
    else:
        p.scheduler.finished(R, PROMPT, TABLE, 16, Outcome.ABORTED)
    p.scheduler.step()
    assert d.told(LoadEnded).loss.reason is Reason.SOURCE_FAILED
    wait_until(lambda: p.side.lead.at_rest() and d.side.lead.at_rest())


@pytest.mark.parametrize("by", ["grant", "address"])
def test_who_takes_no_parts_gets_nothing_of_a_prompt_that_goes_on_otherwise(
    leads: Leads, attach: Attach, by: str
) -> None:
    p, d = At(attach(leads[0], expects_pushes=True)), At(attach(leads[1]), takes_parts=False)
    request, prompt = give(ModeChoice.AUTO), [*PROMPT[:37], 1, 2, 3]
    grant, source = p.prefilled(request), Source(p.side.engine.address)
    take = Offer(grant) if by == "grant" else source
    d.scheduler.arrived(ScheduledRequest(R, prompt, transfer_key=request.transfer_key, take=take))
    d.load()
    assert d.told(LoadEnded).loss.reason is Reason.CONTENT_MISMATCH


def test_a_destination_hears_that_no_such_request_came(sides: Sides) -> None:
    p, d = sides
    waiting(d, p, new_key())
    p.scheduler.step()
    assert d.told(LoadEnded).loss.reason is Reason.SOURCE_FAILED
    wait_until(lambda: p.side.lead.at_rest() and d.side.lead.at_rest())
