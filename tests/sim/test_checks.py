"""The checks of the simulator by themselves: what each takes for broken, and what not."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvgrpc.core.accesses import Opening
from kvgrpc.core.actions import Failed, TransferChanged
from kvgrpc.core.content import chain
from kvgrpc.core.events import Call, Event, HandshakeReceived, OpenAccess, PeerSilent, ProcessEnded, PullBlocks
from kvgrpc.core.grants import OnAbort
from kvgrpc.core.limits import Limits
from kvgrpc.core.node import Node
from kvgrpc.core.peers import Peer, PeerState
from kvgrpc.core.pins import Blocks
from kvgrpc.core.rank_actions import AwaitEnd, UnmapPeer
from kvgrpc.core.timers import Timer, Timers
from kvgrpc.core.transfers import Direction, Disposition, Phase, State, Transfer
from kvgrpc.errors import Reason
from kvgrpc.sim import TIGHT, Violated, World
from kvgrpc.sim.audit import Audit
from kvgrpc.sim.consumers import Consumers
from kvgrpc.sim.ends import Ends
from kvgrpc.sim.farewells import Farewells
from kvgrpc.sim.leftovers import TABLES, leftovers
from kvgrpc.sim.memory import KvStore, Memory, Prompt, layout
from kvgrpc.sim.proven import Proven
from kvgrpc.sim.requests import Offer, Wish
from kvgrpc.sim.waits import Waits
from tests.core.nodes import Lead, claim, describe, endpoints, key_of
from tests.sim.bugs import never

KEY = b"k" * 16
ACCESS = b"a" * 16
LIFE = "D@0000000000000001"
LIMITS = Limits()


def send(done: int) -> Transfer:
    return Transfer("t", Direction.SEND, 0.0, KEY, "", consumers_done=done)


def receive(phases: tuple[Phase, ...], **fields: Any) -> Transfer:
    return Transfer("t", Direction.RECEIVE, 0.0, KEY, "", phases=phases, **fields)


# -- pulls


HANDSHAKE = Phase("handshake", 0.0)
PULL = receive((HANDSHAKE,))


def begun() -> Waits:
    waits = Waits(LIMITS)
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
    waits, reservation = Waits(LIMITS), receive((RENDEZVOUS,))
    waits.reserved(reservation, 5.0)
    waits.check(5.0)
    with pytest.raises(Violated, match=r"t waits 1.000 s too long for its other side"):
        waits.check(6.0)
    waits.changed(receive((RENDEZVOUS, Phase("queue", 4.0))), 4.0)
    waits.check(1e6)


def test_a_push_waits_for_a_part_for_the_registration_timeout() -> None:
    waits = Waits(LIMITS)
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


def late_blocks() -> object:
    """A pull whose engine has room only after the cap of its lease; how it ends."""
    world = World(seed=1, limits=replace(TIGHT, lease_ttl_s=9.0))
    source, consumer = world.hosts
    prompt = Prompt(tuple(range(40)))
    token = source.engine.offer(Offer(KEY, "r", prompt, ttl_s=9.0))
    assert token is not None
    ends: list[object] = []
    consumer.engine.pull(Wish("r", prompt, ACCESS, blocks_after_s=20.0), token, ends.append)
    world.run(30.0)
    world.finish()
    return ends[0]


def test_a_pull_whose_blocks_do_not_come_ends_at_the_cap_of_a_lease() -> None:
    end = late_blocks()
    assert isinstance(end, Failed)
    assert end.failure.reason is Reason.QUEUE_TIMEOUT


def test_a_pull_that_waits_for_its_blocks_without_an_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the random worlds the end of its lease is noticed before."""
    monkeypatch.setattr(Timers, "set", never(Timer.BLOCKS)(Timers.set))
    with pytest.raises(Violated, match=r"in phase queue .* too long"):
        late_blocks()


# -- consumers


def peers(state: PeerState = PeerState.CONNECTED) -> dict[str, Peer]:
    peer = Peer(World(seed=1).hosts[0].description, (), 0.0)
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
    consumers.gave_up(KEY, "D")
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
        consumers.gave_up(KEY, "D")
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


def test_other_timers_are_nobodys_death() -> None:
    consumers, timers = Consumers(peers()), Timers()
    consumers.came(KEY, LIFE)
    timers.set(Timer.ADMIT, LIFE, 9.0)
    consumers.time_passes(timers, 10.0)
    assert consumers.done(KEY) == set()


def test_who_died_while_its_lead_was_stopped_is_done_though_it_is_back_in_the_same_step() -> None:
    """The lead learns of both at once: time passes first, then comes the handshake."""
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
    opening = Opening(ACCESS, token, claim(32))
    feed(OpenAccess(Call(1_000, "d"), "d", 2, (opening,)))
    feed(PeerSilent(key_of(consumer)))
    (ended,) = feed(HandshakeReceived(Call(1_001, "d"), consumer, endpoints(consumer)), LIMITS.peer_grace_s)
    assert ended.transfer.consumers_done == 1
    assert lead.state.peers[key_of(consumer)].state is PeerState.CONNECTED


# -- farewells

PATIENCE_S = LIMITS.connect_timeout_s + LIMITS.settle_timeout_s


def ended(known: dict[str, Peer]) -> Farewells:
    farewells = Farewells(LIMITS, known)
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


def test_whoever_is_dead_is_told_when_it_is_back() -> None:
    known = peers(PeerState.DEAD)
    farewells = ended(known)
    farewells.check(100.0)
    known |= peers()
    farewells.check(100.0 + PATIENCE_S)
    with pytest.raises(Violated):
        farewells.check(101.0 + PATIENCE_S)


def test_nobody_has_to_tell_whom_it_has_forgotten() -> None:
    ended({}).check(100.0)


def test_an_access_that_replaces_another_ends_it() -> None:
    farewells = Farewells(LIMITS, peers())
    farewells.asked(ACCESS, "t", LIFE, b"token")
    farewells.asked(b"b" * 16, "t", LIFE, b"token")
    farewells.over(b"b" * 16)
    farewells.ended("t", 0.0)
    farewells.check(100.0)


def test_a_source_that_was_taken_for_dead_is_told_when_it_is_back() -> None:
    known = peers(PeerState.DEAD)
    farewells = Farewells(LIMITS, known)
    farewells.granted(ACCESS, "t", LIFE)
    farewells.ended("t", 0.0)
    farewells.check(100.0)
    known |= peers()
    farewells.check(100.0)
    with pytest.raises(Violated):
        farewells.check(100.1)


# -- quarantine


QUARANTINED = receive((HANDSHAKE,), state=State.FAILED, memory=Disposition.QUARANTINED)
WRITES = frozenset({f"w-{ACCESS.hex()}"})


def written() -> Proven:
    proven = Proven()
    proven.granted(ACCESS, "t", LIFE)
    return proven


def test_blocks_that_somebody_may_still_write_stay_in_quarantine() -> None:
    proven = written()
    proven.process_ended(ProcessEnded(0, LIFE, drained=True), 2)
    proven.process_ended(ProcessEnded(1, LIFE, drained=False), 2)
    proven.check([QUARANTINED], WRITES)


def test_blocks_whose_writers_are_known_to_be_gone_do_not_stay_in_quarantine() -> None:
    proven = written()
    proven.process_ended(ProcessEnded(0, LIFE, drained=True), 1)
    proven.check_heeded(frozenset())
    with pytest.raises(Violated, match="their writers are known to be gone"):
        proven.check_heeded(WRITES)
    with pytest.raises(Violated, match="their writers are known to be gone"):
        proven.check([QUARANTINED], WRITES)


@pytest.mark.parametrize("transfer", [QUARANTINED, replace(QUARANTINED, direction=Direction.SEND)])
def test_blocks_that_nobody_writes_do_not_stay_in_quarantine(transfer: Transfer) -> None:
    with pytest.raises(Violated, match="all its postings have ended"):
        Proven().check([transfer], frozenset())


def nothing(_: str) -> bool:
    return False


def test_a_source_that_is_at_rest_says_so_where_it_can() -> None:
    proven = written()
    proven.granted(b"b" * 16, "u", "E@0000000000000001")
    proven.check_told(WRITES, lambda life, _: life != LIFE, nothing)
    proven.check_told(frozenset(), lambda _, __: True, nothing)
    with pytest.raises(Violated, match=f"{LIFE} does not say that it writes no more under w-{ACCESS.hex()}, of t"):
        proven.check_told(WRITES, lambda life, transfer_id: (life, transfer_id) == (LIFE, "t"), nothing)


def seen() -> tuple[Ends, list[Event]]:
    """What the two ranks of an engine see; only the first one reaches anybody."""
    events: list[Event] = []
    return Ends(lambda rank, _: rank == 0, events.append), events


@pytest.mark.parametrize("first", ["looks", "ends"])
def test_a_rank_sees_the_end_of_a_process_for_which_it_was_asked_to_look(first: str) -> None:
    ends, events = seen()
    if first == "looks":
        ends.look(AwaitEnd(0, LIFE))
    ends.ended(LIFE, 1, drained=False)
    assert ends.missed(LIFE) is (first == "ends")
    ends.look(AwaitEnd(0, LIFE))
    assert events == [ProcessEnded(0, LIFE, drained=False)]
    ends.ended(LIFE, 1, drained=True)
    assert events[1:] == [ProcessEnded(0, LIFE, drained=True)]
    assert not ends.missed(LIFE)


def test_a_rank_that_forgot_a_process_sees_no_end() -> None:
    ends, events = seen()
    ends.look(AwaitEnd(0, LIFE))
    ends.unmap(UnmapPeer(0, LIFE, watch=True))
    ends.unmap(UnmapPeer(0, LIFE))
    ends.ended(LIFE, 1, drained=True)
    assert events == []
    assert ends.missed(LIFE)


def test_a_rank_that_does_not_reach_a_peer_knows_no_process_of_it() -> None:
    ends, events = seen()
    ends.look(AwaitEnd(0, LIFE))
    ends.look(AwaitEnd(1, LIFE))
    ends.ended(LIFE, 2, drained=True)
    assert events == [ProcessEnded(0, LIFE, drained=True)]
    assert not ends.missed(LIFE)


def test_the_end_of_whoever_may_write_is_looked_for() -> None:
    proven = written()
    assert proven.may_write(LIFE, WRITES)
    assert not proven.may_write(LIFE, frozenset())
    proven.check_told(WRITES, lambda _, __: False, nothing)
    with pytest.raises(Violated, match=f"nobody looks for the end of {LIFE}, which may write under w-{ACCESS.hex()}"):
        proven.check_told(WRITES, lambda _, __: False, lambda life: life == LIFE)


# -- memory


def blocks(*ids: int) -> Blocks:
    return np.array(ids, dtype=np.int64), np.array([], dtype=np.int64)


def pushing() -> Memory:
    memory = Memory(layout(4), 0, KvStore())
    memory.read([1], "t#1/0")
    return memory


def test_what_a_posting_of_its_own_reads_is_not_recycled() -> None:
    memory = pushing()
    memory.scrub(blocks(0))
    with pytest.raises(Violated, match="cell 1 is freed while posting t#1/0 reads it"):
        memory.scrub(blocks(0, 1))
    with pytest.raises(Violated, match="cell 1 is used while posting t#1/0 reads it"):
        memory.compute(blocks(1), Prompt((1,)))
    memory.let_go([1], "t#1/0")
    memory.scrub(blocks(1))


def test_what_is_taken_back_with_the_void_flag_is_recycled_whoever_reads_it() -> None:
    memory = pushing()
    memory.void(blocks(1))
    memory.read([1], "t#1/1")
    memory.scrub(blocks(1))
    memory.void_known(blocks(1))
    memory.scrub(blocks(1))
    memory.read([1], "t#2/0")
    with pytest.raises(Violated):
        memory.scrub(blocks(1))


# -- leftovers


def test_every_table_that_is_looked_into_is_one_of_a_lead() -> None:
    assert leftovers(Node()) == {}


def test_what_is_left_is_told_by_what_it_means() -> None:
    node = Node()
    node.state.turns.began("t", 5)
    assert leftovers(node) == {TABLES["state.turns._in_flight"]: 1, "bytes of turns are not given back": 5}
