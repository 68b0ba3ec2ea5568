"""A scheduler whose lead dies: a hook that raises changes nothing, and no step waits for an answer that cannot come."""

import os
import signal
from collections.abc import Iterator

import pytest

from kvgrpc.core.policy.values import Give, ModeChoice, Outcome, SendEnded
from kvgrpc.engine import Engine, Rank, content
from kvgrpc.engine.scheduler import Offer, ScheduledRequest, Scheduler, scheduler
from kvgrpc.errors import Reason, Unavailable
from tests.engine.conftest import Attach, Leads
from tests.engine.made import layout
from tests.engine.support import WAIT_S, Side, ended, new_key, refused, tokens
from tests.service.conftest import TEST_S
from tests.service.engines import READY_S, wait_until

pytestmark = pytest.mark.timeout(TEST_S)

PROMPT = tokens(40)
SOURCE, TARGET = [1, 2, 9], [30, 31, 5]


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Yields an engine with a lead of its own."""
    with Engine.launch(pool=layout(), flags=("--data-paths", "shm")) as made:
        rank = Rank(made.ticket)
        yield made
        rank.close()


@pytest.fixture
def peer(leads: Leads, attach: Attach) -> Side:
    """Attaches an engine that stays alive."""
    return attach(leads[1])


def kill(engine: Engine) -> None:
    """Kills the lead with SIGKILL and waits for its end."""
    pidfd = os.pidfd_open(engine.lead_pid)
    os.kill(engine.lead_pid, signal.SIGKILL)
    assert ended(pidfd)
    os.close(pidfd)


def test_a_request_refused_between_two_leads_can_be_tried_again_unchanged(engine: Engine, peer: Side) -> None:
    key = new_key()
    reservation = peer.engine.reserve(TARGET, content(PROMPT), transfer_key=key)
    peer.poll_until(lambda _: bool(reservation.grant))
    at = Scheduler(engine)
    wanted = ScheduledRequest("r1", PROMPT, transfer_key=key, give=Give(ModeChoice.PUSH), target=reservation.grant)
    before = engine.incarnation
    kill(engine)
    at.step()
    with refused(Reason.ENGINE_LOST, Unavailable):
        at.arrived(wanted)
    assert len(at.policy) == 0
    wait_until(lambda: at.step(0.05) == [] and engine.incarnation != before, READY_S)
    at.arrived(wanted)
    assert at.finished("r1", PROMPT, [SOURCE], 40, Outcome.COMPLETE).keep
    told: list[object] = []

    def over() -> bool:
        told.extend(at.step(0.05))
        peer.engine.poll(0.05)
        return reservation.over and bool(told)

    wait_until(over, WAIT_S, lambda: told)
    assert told == [SendEnded("r1", None)]


def test_no_step_waits_for_a_dead_leads_transfer(engine: Engine, peer: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    handover = peer.hand_over(SOURCE, PROMPT)
    at = Scheduler(engine)
    os.kill(engine.lead_pid, signal.SIGSTOP)  # the lead dies before it answers
    at.arrived(ScheduledRequest("r1", PROMPT, take=Offer(handover.grant)))
    at.step()
    before = engine.incarnation
    kill(engine)
    at.aborted("r1")
    monkeypatch.setattr(scheduler, "CANCEL_S", READY_S)
    at.step()
    assert engine.incarnation == before, "it waited until there was another lead"
    wait_until(lambda: at.step(0.05) == [] and engine.incarnation != before, READY_S)
    assert len(at.policy) == 0
