"""The simulator's checks of waits and of leftovers: what each check finds, and what it accepts."""

from dataclasses import replace
from math import inf

import pytest

from kvgrpc.core.actions import FailedNews
from kvgrpc.core.events import Call, KeysRenewed, PullBlocks
from kvgrpc.core.node import Node
from kvgrpc.core.tables.timers import Timer, Timers
from kvgrpc.core.tables.transfers import Phase, State
from kvgrpc.core.values.content import chain
from kvgrpc.errors import Reason
from sim import TIGHT, Violated, World
from sim.checks.leftovers import leftovers
from sim.checks.waits import WaitAudit
from sim.engine.requests import PromptOffer, PromptWish
from sim.world.memory import Prompt
from tests.sim.bugs import never
from tests.sim.checks.waiting_pulls import HANDSHAKE, LIMITS, receive, send

KEY = b"k" * 16
ACCESS = b"a" * 16
# -- pulls


PULL = receive((HANDSHAKE,))


def begun() -> WaitAudit:
    waits = WaitAudit(LIMITS)
    waits.begun(PULL, PullBlocks(Call(1, ""), b"", chain((1,)), ACCESS))
    return waits


@pytest.mark.parametrize(
    ("phase", "start", "timeout_s"),
    [("queue", 29.0, 1.0), ("wire", 29.0, LIMITS.transfer_timeout_s), ("settle", 29.0, LIMITS.settle_timeout_s)],
)
def test_a_pull_leaves_every_phase_in_time(phase: str, start: float, timeout_s: float) -> None:
    waits = begun()
    waits.changed(receive((HANDSHAKE, Phase(phase, start))), start)
    waits.check(start + timeout_s)
    with pytest.raises(Violated, match=f"in phase {phase} 1.000 s too long"):
        waits.check(start + timeout_s + 1.0)
    with pytest.raises(Violated, match=f"in phase {phase} 1.000 s too long"):
        waits.changed(receive((HANDSHAKE, Phase(phase, start)), state=State.FAILED, ended=start + timeout_s + 1.0), 0.0)


def test_checksums_are_compared_within_the_time_for_the_bytes() -> None:
    waits = begun()
    waits.changed(receive((HANDSHAKE, Phase("wire", 1.0))), 1.0)
    waits.changed(receive((HANDSHAKE, Phase("wire", 1.0), Phase("checksum", 30.0))), 30.0)
    waits.check(31.0)
    with pytest.raises(Violated):
        waits.check(32.0)


def test_a_pull_that_gets_its_blocks_late_has_its_queue_timeout_anew() -> None:
    waits = begun()
    waits.changed(receive((HANDSHAKE, Phase("queue", 1.0)), waiting_for="blocks"), 1.0)
    waits.check(LIMITS.lease_cap_s)
    waits.given("t", 100.0)
    waits.check(130.0)
    with pytest.raises(Violated):
        waits.check(131.0)


RENDEZVOUS = Phase("rendezvous", 0.0)


def test_a_reservation_waits_for_its_source_as_long_as_was_asked_for() -> None:
    waits, reservation = WaitAudit(LIMITS), receive((RENDEZVOUS,))
    waits.reserved(reservation, 5.0)
    waits.check(5.0)
    with pytest.raises(Violated, match=r"t waits 1.000 s too long for its other side"):
        waits.check(6.0)
    waits.changed(receive((RENDEZVOUS, Phase("queue", 4.0))), 4.0)
    waits.check(1e6)


def test_a_push_waits_for_a_part_for_the_registration_timeout() -> None:
    waits = WaitAudit(LIMITS)
    apart = replace(send(0), phases=(RENDEZVOUS,))
    waits.changed(apart, 0.0)
    waits.changed(apart, 1.0)
    waits.check(LIMITS.registration_timeout_s)
    with pytest.raises(Violated, match=r"t waits 1.000 s too long for its other side"):
        waits.check(LIMITS.registration_timeout_s + 1.0)
    waits.changed(replace(apart, lease_id="l"), 2.0)
    waits.check(1e6)
    waits.changed(apart, 3.0)
    with pytest.raises(Violated):
        waits.check(LIMITS.registration_timeout_s + 4.0)


def test_a_reservation_waits_longer_where_its_source_keeps_what_it_waits_for_and_never_beyond_the_cap() -> None:
    waits, reservation = WaitAudit(LIMITS), receive((RENDEZVOUS,))
    waits.reserved(reservation, 5.0)
    waits.hears(KeysRenewed("p", ((b"o" * 16, 90.0), (reservation.key, inf))), 4.0)
    with pytest.raises(Violated):
        waits.check(6.0)
    waits.hears(KeysRenewed("p", ((reservation.key, 20.0),)), 4.0)
    waits.check(24.0)
    waits.hears(KeysRenewed("p", ((reservation.key, 1e9),)), 24.0)
    waits.check(LIMITS.lease_cap_s)
    with pytest.raises(Violated):
        waits.check(LIMITS.lease_cap_s + 1.0)


def late_blocks() -> object:
    """Returns the end of a pull whose engine has room only after the cap of its lease."""
    world = World(seed=1, limits=replace(TIGHT, lease_ttl_s=9.0))
    source, consumer = world.hosts
    prompt = Prompt(tuple(range(40)))
    token = source.engine.offer(PromptOffer(KEY, "r", prompt, ttl_s=9.0))
    assert token is not None
    ends: list[object] = []
    consumer.engine.pull(PromptWish("r", prompt, ACCESS, blocks_after_s=20.0), token, ends.append)
    world.run(30.0)
    world.finish()
    return ends[0]


def test_a_pull_whose_blocks_do_not_come_ends_at_the_cap_of_a_lease() -> None:
    end = late_blocks()
    assert isinstance(end, FailedNews)
    assert end.failure.reason is Reason.QUEUE_TIMEOUT


def test_a_pull_that_waits_for_its_blocks_without_an_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test makes its own world: in random worlds the lease ends first."""
    monkeypatch.setattr(Timers, "set", never(Timer.BLOCKS)(Timers.set))
    with pytest.raises(Violated, match=r"in phase queue .* too long"):
        late_blocks()


# -- leftovers


def test_every_table_that_is_looked_into_is_one_of_a_lead() -> None:
    assert leftovers(Node()) == {}


def test_what_is_left_is_told_by_what_it_means() -> None:
    node = Node()
    node.state.moves.turns.began("t", 5)
    assert leftovers(node) == {"turns are still in_flight": 1, "bytes of turns are not given back": 5}
