"""The simulator's checks of consumers, and of the closes that a lead owes its peers."""

import pytest

from kvgrpc.core.actions import TransferChanged
from kvgrpc.core.events import Call, CloseOutcome, Event, HandshakeReceived, OpenAccess, PeerSilent
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.peers import Peer, PeerState
from kvgrpc.core.tables.timers import Timer, Timers
from kvgrpc.core.values.bridge import bridges
from kvgrpc.core.values.compatibility import side_of
from kvgrpc.core.values.grants import OnAbort
from sim import Violated, World
from sim.checks.audit import Audit
from sim.checks.closings import CloseAudit
from sim.checks.consumers import Consumers
from tests.core.nodes import Lead, claim, describe, endpoints, key_of
from tests.sim.checks.waiting_pulls import LIMITS, send

KEY = b"k" * 16
ACCESS = b"a" * 16
LIFE = "D@0000000000000001"


# -- consumers


def peers(state: PeerState = PeerState.CONNECTED) -> dict[str, Peer]:
    description = World(seed=1).hosts[0].description
    peer = Peer(description, (), bridges(side_of(description), side_of(description)), 0.0)
    peer.state = state
    return {LIFE: peer}


def test_who_came_is_not_done_for_it() -> None:
    consumers = Consumers(peers())
    consumers.came(KEY, LIFE)
    consumers.check(send(0))
    with pytest.raises(Violated, match="1 consumers of t are counted as done, of 0 that are"):
        consumers.check(send(1))


def test_one_engine_is_one_consumer_however_often_it_is_done() -> None:
    consumers = Consumers(peers())
    consumers.received(KEY, "D")
    consumers.closes(KEY, "D", CloseOutcome.DROPPED)
    consumers.closes(KEY, "D", CloseOutcome.CANCELLED)
    consumers.received(KEY, "D")
    consumers.check(send(1))
    with pytest.raises(Violated):
        consumers.check(send(2))


@pytest.mark.parametrize("on_abort", OnAbort)
@pytest.mark.parametrize("how", ["gives up", "is dead", "was dead"])
def test_who_gives_up_or_dies_is_done_where_the_grant_says_so(on_abort: OnAbort, how: str) -> None:
    consumers = Consumers(peers(PeerState.DEAD if how == "is dead" else PeerState.CONNECTED))
    consumers.handed_over(KEY, on_abort)
    consumers.came(KEY, LIFE)
    if how == "gives up":
        consumers.closes(KEY, "D", CloseOutcome.DROPPED)
    elif how == "was dead":
        consumers.hung_up(LIFE)
    assert consumers.done(KEY) == ({"D"} if on_abort is OnAbort.RELEASE else set())


def test_an_engine_is_done_when_a_life_of_it_dies_that_answered_in_place_of_the_one_that_came() -> None:
    consumers = Consumers(peers())
    consumers.hung_up("D@0000000000000000")
    consumers.came(KEY, LIFE)
    assert consumers.done(KEY) == set()
    consumers.hung_up("D@0000000000000002")
    assert consumers.done(KEY) == {"D"}


def test_who_was_silent_for_the_grace_is_done_and_not_before() -> None:
    consumers, timers = Consumers(peers()), Timers()
    consumers.came(KEY, LIFE)
    timers.set(Timer.PEER_GRACE, LIFE, 10.0)
    consumers.time_passes(timers, 9.9)
    assert consumers.done(KEY) == set()
    consumers.time_passes(timers, 10.0)
    assert consumers.done(KEY) == {"D"}


def test_other_timers_declare_no_peer_dead() -> None:
    consumers, timers = Consumers(peers()), Timers()
    consumers.came(KEY, LIFE)
    timers.set(Timer.ADMIT, LIFE, 9.0)
    consumers.time_passes(timers, 10.0)
    assert consumers.done(KEY) == set()


def test_who_died_while_its_lead_was_stopped_is_done_though_it_is_back_in_the_same_step() -> None:
    """The lead learns of both at once: its clock passes the grace first, then the handshake arrives."""
    lead, consumer = Lead(), describe("d", 2)
    audit = Audit(lead.node, set(), set())

    def feed(event: Event, after_s: float = 0.0) -> list[TransferChanged]:
        audit.hears(event, lead.now + after_s)
        lead.feed(event, after_s)
        changed = lead.seen(TransferChanged)
        for action in changed:
            audit.changed(action)
        return changed

    lead.admit(consumer)
    token = lead.finish(ttl_s=30.0).token
    opening = AccessOpening(ACCESS, token, claim(32))
    feed(OpenAccess(Call(1_000, "d"), "d", 2, (opening,)))
    feed(PeerSilent(key_of(consumer)))
    (ended,) = feed(HandshakeReceived(Call(1_001, "d"), consumer, endpoints(consumer)), LIMITS.peer_grace_s)
    assert ended.transfer.consumers_done == 1
    assert lead.state.peers.lives[key_of(consumer)].state is PeerState.CONNECTED


# -- farewells


PATIENCE_S = LIMITS.connect_timeout_s + LIMITS.settle_timeout_s


def ended(known: dict[str, Peer]) -> CloseAudit:
    farewells = CloseAudit(LIMITS, known)
    farewells.asked(ACCESS, "t", LIFE)
    farewells.ended("t", 0.0)
    return farewells


def test_a_peer_is_told_of_the_end_of_an_access() -> None:
    farewells = ended(peers())
    farewells.check(PATIENCE_S)
    with pytest.raises(Violated, match=f"{LIFE} is not told that access a-{ACCESS.hex()} of t is over"):
        farewells.check(PATIENCE_S + 1.0)
    farewells.over(ACCESS)
    farewells.check(PATIENCE_S + 1.0)


def test_a_dead_peer_is_told_when_it_is_back() -> None:
    known = peers(PeerState.DEAD)
    farewells = ended(known)
    farewells.check(100.0)
    known |= peers()
    farewells.check(100.0 + PATIENCE_S)
    with pytest.raises(Violated):
        farewells.check(101.0 + PATIENCE_S)


def test_a_forgotten_peer_is_not_told() -> None:
    ended({}).check(100.0)


def test_an_access_that_replaces_another_ends_it() -> None:
    farewells = CloseAudit(LIMITS, peers())
    farewells.asked(ACCESS, "t", LIFE, b"token")
    farewells.asked(b"b" * 16, "t", LIFE, b"token")
    farewells.over(b"b" * 16)
    farewells.ended("t", 0.0)
    farewells.check(100.0)


def test_a_source_that_was_declared_dead_is_told_when_it_is_back() -> None:
    known = peers(PeerState.DEAD)
    farewells = CloseAudit(LIMITS, known)
    farewells.granted(ACCESS, "t", LIFE)
    farewells.ended("t", 0.0)
    farewells.check(100.0)
    known |= peers()
    farewells.check(100.0)
    with pytest.raises(Violated):
        farewells.check(100.1)
