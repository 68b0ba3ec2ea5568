"""Sends at the source: who may have which bytes sent, how callers are answered, and what a refusal leaves unchanged."""

from dataclasses import replace
from typing import Any

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.access import post_sends
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, uniform_layout
from kvgrpc.core.values.sends import MEET, SendAsk
from kvgrpc.errors import Reason
from tests.core.nodes import KEY, Lead, access_id, claim, describe, full, ids, key_of, refused, snapshot
from tests.core.pairs import Pair
from tests.core.pool.written import Written

BLOCK = 8
"""Bytes of a block in one layer."""
LAYER = 64 * BLOCK
"""Offset of the second layer, in bytes."""
VALUES = (("address", b"here"),)


def ask(*runs: tuple[int, int], rank: int = 0, source_rank: int = 0, epoch: int = 1, sequence: int = 1) -> SendAsk:
    """Makes an ask for runs, each an (offset, length) in bytes."""
    return SendAsk(source_rank, rank, epoch, sequence, ids(*(at for at, _ in runs)), ids(*(n for _, n in runs)))


BOTH = ask((8 * BLOCK, 2 * BLOCK), (LAYER + 9 * BLOCK, BLOCK))
"""An ask for blocks 8 and 9."""
MEETING = SendAsk(0, 0, 1, MEET, values=VALUES)


class Source(Lead):
    """A lead whose blocks 8 and 9 a peer reads."""

    def __init__(self, ranks: int = 1, ranks_there: int = 0, **changes: Any) -> None:
        super().__init__(describe("p", 1, world_size=ranks, **changes))
        self.peer = describe("d", 2, world_size=ranks_there or ranks, **changes)
        self.admit(self.peer)
        self.handed = self.finish(32, (8, 9))
        self.opened(self.peer, AccessOpening(access_id(), self.handed.token, claim(32)))

    def ask_send(self, wanted: SendAsk, number: int = 1, peer: Any = None) -> int:
        who = peer or self.peer
        access = access_id(number) if number else b""
        return self.ask(lambda c: events.PostSend(c, who.engine_id, who.incarnation, access, wanted), "peer")

    def check_refused(self, reason: Reason, wanted: SendAsk, number: int = 1, peer: Any = None) -> None:
        """Asserts that the ask is refused at once, and changes nothing."""
        before = snapshot(self.state)
        call = self.ask_send(wanted, number, peer)
        with refused(reason):
            self.answer(call)
        assert not self.seen(actions.Send)
        assert snapshot(self.state) == before


def test_a_rank_sends_what_the_access_covers_and_the_caller_hears_when_it_is_under_way() -> None:
    lead = Source()
    call = lead.ask_send(BOTH)
    send = lead.one(actions.Send)
    assert (send.rank, send.peer, send.ask) == (0, key_of(lead.peer), BOTH)
    assert lead.answer(call) is None
    lead.feed(events.SendPosted(0, send.name))
    assert lead.answer(call) == actions.SendUnderWay(())
    assert not lead.state.access.sends
    assert lead.state.timers.when(Timer.SEND, send.name) is None
    assert lead.state.send.leases.get(lead.handed.lease.id).done == 0, "nothing has arrived yet"
    lead.feed(events.SendPosted(0, send.name))


def test_a_rank_that_does_not_send_says_why() -> None:
    lead = Source()
    call = lead.ask_send(BOTH)
    lead.feed(events.SendPosted(0, lead.one(actions.Send).name, message="send 1 does not follow send 1"))
    with refused(Reason.DATA_PATH_FAILED):
        lead.answer(call)


def test_a_rank_that_can_never_meet_the_other_one_says_so() -> None:
    lead = Source()
    call = lead.ask_send(MEETING, number=0)
    lead.feed(events.SendPosted(0, lead.one(actions.Send).name, message="no library", permanent=True))
    with refused(Reason.NO_DATA_PATH):
        lead.answer(call)


def test_ranks_meet_without_an_access_and_tell_each_other_what_they_have_to() -> None:
    lead = Source()
    call = lead.ask_send(MEETING, number=0)
    send = lead.one(actions.Send)
    assert send.ask is MEETING
    lead.feed(events.SendPosted(0, send.name, (("store", b"there"),)))
    assert lead.answer(call) == actions.SendUnderWay((("store", b"there"),))


def test_only_bytes_of_the_blocks_of_a_peers_own_valid_access_are_sent() -> None:
    lead = Source()
    stranger = describe("e", 3)
    lead.admit(stranger)
    lead.check_refused(Reason.ACCESS_NOT_FOUND, BOTH, number=7)
    lead.check_refused(Reason.ACCESS_NOT_FOUND, BOTH, number=0)
    lead.check_refused(Reason.ACCESS_NOT_FOUND, BOTH, peer=stranger)
    lead.check_refused(Reason.NO_HANDSHAKE, BOTH, peer=describe("f", 4))
    for wanted in (
        ask((7 * BLOCK, BLOCK)), ask((8 * BLOCK, 2 * BLOCK), (10 * BLOCK, 1)), ask((8 * BLOCK, 3 * BLOCK)),
        ask((LAYER + 10 * BLOCK - 1, 2)), ask((8 * BLOCK, 0)), ask((-1, 1)), ask((2 * LAYER + 8 * BLOCK, BLOCK)),
    ):  # fmt: skip
        lead.check_refused(Reason.NOT_OWNER, wanted)


def test_a_rank_sends_of_the_layers_of_its_stage() -> None:
    """The second stage begins with a gap where the first one has its layer."""
    pool = full()
    first, second = pool.regions
    staged = PoolLayout(pool.groups, (first, replace(second, stage=1)), pool.total_bytes)
    lead = Source(ranks=2, pool=staged)
    at = (8 * BLOCK, 2 * BLOCK), (LAYER + 8 * BLOCK, 2 * BLOCK)
    for rank in range(2):
        lead.ask_send(ask(at[rank], rank=rank, source_rank=rank))
        assert lead.one(actions.Send).rank == rank
        lead.check_refused(Reason.NOT_OWNER, ask(at[1 - rank], rank=rank, source_rank=rank))


def test_ranks_that_exchange_no_bytes_do_not_send() -> None:
    lead = Source(ranks=2)
    for rank, source_rank in ((0, 1), (1, 0), (0, 2), (2, 0)):
        lead.check_refused(Reason.INVALID_FIELD, replace(BOTH, rank=rank, source_rank=source_rank))
        lead.check_refused(Reason.INVALID_FIELD, replace(MEETING, rank=rank, source_rank=source_rank), number=0)
    lead.ask_send(replace(BOTH, rank=1, source_rank=1))
    assert lead.one(actions.Send).rank == 1


def test_ranks_meet_that_exchange_bytes_the_other_way_only() -> None:
    """Ranks have the same latents, so each reads from one rank only; pairs of ranks are mapped for both directions."""
    latents = uniform_layout(Group("full", GroupKind.MLA, 2, 16, 64, 1, 1, "uint8"), 8)
    lead = Source(ranks=2, ranks_there=1, pool=latents)
    assert (1, 0) in lead.state.peers.lives[key_of(lead.peer)].bridges.pairs
    lead.ask_send(replace(MEETING, source_rank=1), number=0)
    assert lead.one(actions.Send).rank == 1
    lead.check_refused(Reason.INVALID_FIELD, replace(BOTH, source_rank=1))


@pytest.mark.parametrize("end", ["closed", "released", "expired", "voided"])
def test_nothing_is_sent_under_an_access_that_is_over(end: str) -> None:
    lead = Source()
    lease = lead.handed.lease.id
    reasons = {
        "closed": Reason.ACCESS_CLOSED,
        "released": Reason.LEASE_RELEASED,
        "expired": Reason.LEASE_EXPIRED,
        "voided": Reason.LEASE_VOIDED,
    }
    if end == "closed":
        lead.close(lead.peer)
    elif end == "released":
        lead.call(lambda c: events.ReleaseLease(c, events.LeaseRef(lease)))
    elif end == "expired":
        lead.tick(30.0)
    else:
        lead.feed(events.LeasesVoided((lease,)))
    lead.check_refused(reasons[end], BOTH)


def test_nothing_is_sent_of_what_was_opened_before_a_rekey_or_before_its_new_handshake() -> None:
    lead = Written()
    lead.push(3, 4)
    handed = lead.finish(32, (8, 9), key=KEY, ttl_s=60.0)
    lead.opened(lead.peer, AccessOpening(access_id(), handed.token, claim(32)))

    def send() -> Any:
        call = lead.ask(lambda c: events.PostSend(c, "p", 1, access_id(), BOTH), "peer")
        return lead.answer(call)

    lead.release()
    with refused(Reason.MEMORY_CHANGED):
        send()
    lead.tick(30.0)
    lead.rekeyed()
    with refused(Reason.MEMORY_CHANGED):
        send()


def test_what_is_sent_of_an_access_that_ended_meanwhile_is_not_vouched_for() -> None:
    """The blocks may hold another request's bytes by then. The verdict reports that; the send's answer does not."""
    lead = Source()
    call = lead.ask_send(BOTH)
    send = lead.one(actions.Send)
    lead.call(lambda c: events.ReleaseLease(c, events.LeaseRef(lead.handed.lease.id)))
    lead.feed(events.SendPosted(0, send.name))
    assert lead.answer(call) == actions.SendUnderWay(())
    verdict = lead.settle(lead.peer)
    assert (verdict.valid, verdict.reason) == (False, Reason.LEASE_RELEASED)


def test_a_write_grant_lets_nobody_read() -> None:
    pair = Pair(frozenset({"loopback"}))
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    (opened,) = [action for action in pair.sent if isinstance(action, actions.SendOpen)]
    call = pair.d.ask(
        lambda c: events.PostSend(c, "p", 1, opened.opening.access_id, ask((3 * BLOCK, BLOCK))), principal="peer"
    )
    with refused(Reason.ACCESS_NOT_FOUND):
        pair.d.answer(call)


def test_of_a_push_only_the_parts_that_are_ready_are_sent() -> None:
    pair = Pair()
    pair.register(pair.reserve(64, (3, 4, 5, 6)).token)
    pair.finish(64, (1, 2), last=False)
    (opened,) = [action for action in pair.sent if isinstance(action, actions.SendOpen)]
    reverse = opened.opening.reverse_access_id

    def send(block: int) -> Any:
        call = pair.p.ask(lambda c: events.PostSend(c, "d", 2, reverse, ask((block * BLOCK, BLOCK))), principal="peer")
        return pair.p.seen(actions.Send) or pair.p.answer(call)

    assert send(1)
    with refused(Reason.NOT_OWNER):
        send(7)
    pair.finish(64, (7, 8), content=None, after_step=3)
    with refused(Reason.NOT_OWNER):
        send(7)
    pair.feed(pair.p, events.StepDone(0, 3))
    assert send(7)
    assert send(2)


def test_few_sends_of_a_pair_of_ranks_wait_and_other_pairs_are_not_held_up() -> None:
    lead = Source(ranks=2)
    calls = [lead.ask_send(BOTH) for _ in range(post_sends.WAITING_OF_PAIR_MAX)]
    lead.check_refused(Reason.LIMIT_EXCEEDED, BOTH)
    lead.check_refused(Reason.LIMIT_EXCEEDED, MEETING, number=0)
    lead.ask_send(replace(BOTH, rank=1, source_rank=1))
    assert lead.one(actions.Send)
    lead.feed(events.CallAbandoned(calls[0]))
    lead.ask_send(BOTH)
    assert lead.one(actions.Send)


def test_a_rank_that_takes_too_long_and_a_caller_that_is_gone_end_the_call() -> None:
    lead = Source()
    late = lead.ask_send(BOTH)
    name = lead.one(actions.Send).name
    lead.tick(post_sends.POST_S)
    with refused(Reason.DEADLINE):
        lead.answer(late)
    lead.feed(events.SendPosted(0, name))
    gone = lead.ask_send(BOTH)
    name = lead.one(actions.Send).name
    lead.feed(events.CallAbandoned(gone))
    with refused(Reason.DEADLINE):
        lead.answer(gone)
    lead.feed(events.SendPosted(0, name, message="broke"))
    lead.feed(events.CallAbandoned(gone))
    assert not lead.state.access.sends


def test_sends_that_wait_end_with_the_life_of_the_engine() -> None:
    lead = Source()
    calls = [lead.ask_send(BOTH), lead.ask_send(MEETING, number=0)]
    names = [f"p{call}" for call in calls]
    lead.begin(describe("p", 5))
    for call in calls:
        with refused(Reason.ENGINE_LOST):
            lead.answer(call)
    assert not lead.state.access.sends
    for name in names:
        lead.feed(events.SendPosted(0, name))


def test_a_dead_peer_has_nothing_sent() -> None:
    lead = Source()
    waiting = lead.ask_send(BOTH)
    name = lead.one(actions.Send).name
    lead.feed(events.PeerSilent(key_of(lead.peer)))
    lead.tick(10.0)
    lead.check_refused(Reason.NO_HANDSHAKE, BOTH)
    lead.check_refused(Reason.NO_HANDSHAKE, MEETING, number=0)
    lead.feed(events.SendPosted(0, name))
    assert lead.answer(waiting) == actions.SendUnderWay(())


def test_a_server_that_drains_sends_what_was_handed_over_before() -> None:
    lead = Source()
    lead.call(events.StartDrain, "operator")
    lead.ask_send(BOTH)
    assert lead.one(actions.Send)


def test_a_life_that_a_defect_ended_sends_nothing_more() -> None:
    lead = Source()
    lead.ask_send(BOTH)
    lead.node, _ = lead.node.successor(7, lead.now)
    lead.node.check()
    assert not lead.state.access.sends
    assert lead.state.timers.when(Timer.SEND, "p1") is None
    lead.check_refused(Reason.NO_HANDSHAKE, BOTH)
