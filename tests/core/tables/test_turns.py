"""Turns to move bytes, and how long important moves wait under a flood of others."""

from __future__ import annotations

import random
from statistics import quantiles

import numpy as np
import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.moves import course
from kvgrpc.core.state.move_table import Turns
from kvgrpc.core.tables.accesses import Verdict
from kvgrpc.core.tables.transfers import State
from kvgrpc.core.values import parts
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import Reason
from tests.core.nodes import Lead, answer_of, describe, endpoints, full, grant
from tests.core.pairs import READING, WRITING, Pair, Writers


def test_higher_priority_goes_first_and_equals_go_in_the_order_of_asking() -> None:
    turns = Turns(10)
    assert turns.take("a", 0)
    turns.began("a", 10)
    for name, priority in (("low", -1), ("b", 0), ("high", 5), ("c", 0)):
        assert not turns.take(name, priority)
    assert turns.next() is None
    turns.ended("a")
    order = []
    while (next_one := turns.next()) is not None:
        order.append(next_one)
        turns.began(next_one, 10)
        turns.ended(next_one)
    assert order == ["high", "b", "c", "low"]
    assert turns.nbytes == 0


def test_one_that_comes_when_there_is_room_does_not_overtake_those_that_wait() -> None:
    turns = Turns(10)
    turns.began("a", 10)
    assert not turns.take("b", 1)
    turns.ended("a")
    assert not turns.take("c", 1)
    assert turns.take("d", 2)
    assert turns.next() == "b"
    assert turns.take("b", 1)
    assert turns.next() == "c"


def test_a_move_that_leaves_waits_no_more_and_keeps_no_other_waiting() -> None:
    turns = Turns(10)
    turns.began("a", 10)
    for name in "bc":
        assert not turns.take(name, 0)
        assert not turns.take(name, 0)
    turns.leave("b")
    turns.leave("a")
    assert turns.next() == "c"
    assert turns.next() is None


@pytest.mark.parametrize("most", [1, 3, 8, 11, 12, 100])
def test_the_slices_of_runs_are_the_runs(most: int) -> None:
    runs = Runs(np.array([0, 20, 50]), np.array([100, 200, 300]), np.array([8, 1, 3]))
    wanted = {
        (int(s) + i, int(d) + i) for s, d, n in zip(runs.src, runs.dst, runs.nbytes, strict=True) for i in range(n)
    }
    found: list[tuple[int, int]] = []
    left: Runs | None = runs
    while left is not None:
        part, left = left.split(most)
        assert 0 < part.total_bytes <= most
        assert part.nbytes.min() > 0
        found += [
            (int(s) + i, int(d) + i) for s, d, n in zip(part.src, part.dst, part.nbytes, strict=True) for i in range(n)
        ]
    assert sorted(found) == sorted(wanted)


def test_a_transfer_larger_than_may_be_in_flight_moves_in_slices() -> None:
    pair = Pair(in_flight_bytes=24)
    pair.register(pair.reserve(64, range(4)).token)
    pair.finish(64, (9, 8, 7, 6))
    sizes = []
    while pair.posts:
        sizes.append(pair.posts[0][1].runs.total_bytes)
        pair.moved(1)
    assert sizes == [24, 24, 16]
    assert [t.state for t in pair.both()] == [State.SUCCEEDED] * 2


def test_one_that_waits_for_its_turn_says_so_and_has_its_time() -> None:
    pair = Pair(in_flight_bytes=16)
    pair.register(pair.reserve(32, (0, 1)).token)
    pair.finish(32, (9, 8))
    second = b"another key of a request"
    reserved = pair.reserve(32, (5, 6), key=second)
    pair.register(reserved.token, number=50)
    pair.finish(32, (4, 3), key=second)
    waiting = pair.d.transfer(reserved.transfer.id)
    assert (waiting.waiting_for, len(pair.posts)) == ("turn", 1)
    pair.tick(31.0)
    failure = pair.d.transfer(waiting.id).failure
    assert failure is not None
    assert failure.reason is Reason.TRANSFER_TIMEOUT


def two(pair: Pair, first_tokens: int) -> None:
    """Starts a push of `first_tokens` tokens, and a second one of 64."""
    first = b"the first of two requests"
    count = -(-first_tokens // 16)
    pair.register(pair.reserve(first_tokens, range(20, 20 + count), key=first).token)
    pair.finish(first_tokens, range(30, 30 + count), key=first)
    pair.register(pair.reserve(64, range(4)).token, number=50)
    pair.finish(64, (9, 8, 7, 6))


def test_transfers_of_one_priority_move_slice_by_slice_in_turn() -> None:
    pair = Pair(in_flight_bytes=32)
    two(pair, 64)
    moved = []
    while pair.posts:
        moved.append(pair.posts[0][1].transfer_id)
        pair.moved(1)
    assert moved[0] != moved[1]
    assert moved == [moved[0], moved[1]] * 2


def test_a_transfer_between_two_slices_waits_until_its_peer_is_mapped_again() -> None:
    pair = Pair(in_flight_bytes=24)
    two(pair, 16)
    assert [post.runs.total_bytes for _, post in pair.posts] == [16, 24]
    pair.deaf = {actions.Dial}
    pair.moved(1, done=False, message="broken")
    pair.moved(1)
    assert not pair.posts
    pair.deaf.clear()
    pair.d.connect(pair.p.me)
    (post,) = pair.d.seen(actions.Post)
    assert post.runs.total_bytes == 24


def test_bytes_in_flight_are_waited_for_though_the_peer_answers_a_dial_meanwhile() -> None:
    pair = Pair()
    first = b"the first of two requests"
    pair.register(pair.reserve(16, (20,), key=first).token)
    pair.finish(16, (30,), key=first)
    reserved = pair.reserve(32, (3, 4))
    pair.register(reserved.token, number=50)
    pair.deaf = {actions.Dial}
    pair.moved(done=False, message="broken")
    pair.finish(32, (1,), last=False)
    assert pair.d.transfer(reserved.transfer.id).waiting_for == "handshake"
    pair.d.admit(pair.p.me)
    pair.finish(32, (2,))
    assert len(pair.posts) == 1, "the peer has introduced itself"
    pair.d.feed(events.PeerAnswered(pair.p.me.address, pair.p.me, endpoints(pair.p.me)))
    assert not pair.d.seen(actions.SendSettle)
    pair.moved()
    assert pair.d.transfer(reserved.transfer.id).state is State.SUCCEEDED


SIZE = 64
"""Bytes of every transfer, and of all postings in flight at most; one byte takes one unit of time."""


class Link:
    """A lead that pulls over a link that its postings share fairly, in virtual time."""

    def __init__(self) -> None:
        self.lead = Lead(describe("d", 2, pool=full(blocks=2048)), Limits(in_flight_bytes=SIZE, lease_cap_s=1e9))
        self.lead.checked = False
        self.took: list[float] = []
        """Time that each important pull took, in virtual units."""
        self._source = describe("p", 1, pool=full(blocks=2048))
        self._left: dict[str, float] = {}
        self._begun: dict[str, tuple[float, int, bool]] = {}
        self._free = list(range(0, 2048, 4))
        self._count = 0
        self.pull(important=False)
        self._perform(self.lead.connect(self._source))

    def pull(self, *, important: bool) -> None:
        self._count += 1
        first = self._free.pop()
        token = grant(self._source, tokens=64, key=self._count.to_bytes(16, "big"), lease_id=f"l-{self._count}")
        blocks = range(first, first + 4)
        answer = self.lead.pull(
            token, 64, blocks, number=self._count, priority=important, queue_timeout_s=1e8, transfer_timeout_s=1e8
        )
        self._begun[answer.id] = (self.lead.now, first, important)
        self._perform(self.lead.done)

    def run(self, until: float) -> None:
        """Lets postings move until the time `until`."""
        while self._left and self.lead.now + min(self._left.values()) * len(self._left) <= until:
            self._advance(min(self._left.values()) * len(self._left))
            for name in [name for name, left in self._left.items() if left < 1e-6]:
                del self._left[name]
                self._perform(self.lead.feed(events.PostingEnded(name, done=True, nbytes=SIZE)))
        self._advance(until - self.lead.now)

    def _advance(self, for_s: float) -> None:
        for name in self._left:
            self._left[name] -= for_s / len(self._left)
        self.lead.now += for_s

    def _perform(self, done: list[actions.Action]) -> None:
        for action in done:
            match action:
                case actions.Post():
                    self._left[action.posting_id] = float(action.runs.total_bytes)
                case actions.SendOpen():
                    answer = answer_of(self._source, 64, range(4))
                    self._perform(self.lead.feed(events.AccessAnswered(action.opening.access_id, answer)))
                case actions.SendSettle():
                    answered = events.SettleAnswered(action.settling.access_id, Verdict(valid=True))
                    self._perform(self.lead.feed(answered))
                case actions.TellEngine(actions.ReceivedNews() as news):
                    self._received(news.transfer_id)

    def _received(self, transfer_id: str) -> None:
        started, first, important = self._begun.pop(transfer_id)
        self._free.append(first)
        if important:
            self.took.append(self.lead.now - started)
        else:
            self.pull(important=False)


def p99(flood: int) -> float:
    """Returns the 99th percentile of the time of important pulls while `flood` other pulls compete at a time."""
    link = Link()
    if not flood:
        link.pull = lambda **_: None  # type: ignore[method-assign]
        link.run(1_000.0)
        del link.pull
    for _ in range(flood - 1):
        link.pull(important=False)
    rng = random.Random(1)
    for _ in range(120):
        link.run(link.lead.now + rng.uniform(200.0, 500.0))
        link.pull(important=True)
    link.run(link.lead.now + 1_000.0)
    assert len(link.took) == 120
    return quantiles(link.took, n=100)[98]


def test_under_a_flood_an_important_transfer_takes_at_most_twice_its_time() -> None:
    alone, flooded = p99(0), p99(200)
    assert alone == pytest.approx(SIZE)
    assert flooded <= 2 * alone


@pytest.mark.parametrize("writers", [READING, WRITING], ids=["destination moves", "source moves"])
def test_a_round_of_many_runs_is_posted_slice_by_slice(writers: Writers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "RUNS_MAX", 3)
    pair = Pair(writers)
    for layer in range(2):
        pair.finish(64, (9, 7, 5, 3), last=layer == 1, layers=(layer, 1))
    pair.register(pair.reserve(64, (0, 2, 4, 6)).token)
    moving = pair.both()[0 if writers else 1].id
    sizes, descriptors = [], []
    while pair.posts:
        (lead, post), *_ = pair.posts
        sizes.append(len(post.runs))
        descriptors.append(lead.transfer(moving).paths[0].descriptors)
        assert lead.transfer(moving).nbytes == 64
        pair.moved(1)
    assert (sizes, descriptors) == ([3, 1, 3, 1], [3, 4, 7, 8])
    assert [t.state for t in pair.both()] == [State.SUCCEEDED] * 2


@pytest.mark.parametrize("writers", [READING, WRITING], ids=["destination moves", "source moves"])
def test_a_late_destination_gets_all_parts_some_at_a_time(writers: Writers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "BATCH_PARTS", 2)
    pair = Pair(writers)
    for i in range(5):
        pair.finish(80, (9 - i,), last=i == 4)
    pair.register(pair.reserve(80, range(0, 10, 2)).token)
    told = [len(action.opening.parts) for action in pair.sent if isinstance(action, actions.SendOpen)]
    told += [len(action.parts) for action in pair.sent if isinstance(action, actions.SendParts)]
    assert told == ([0] if writers else [2, 2, 1])
    moved = []
    while pair.posts:
        moved.append(pair.posts[0][1].runs.src.tolist()[: len(pair.posts[0][1].runs) // 2])
        pair.moved(1)
    assert moved == [[72, 584], [56, 568], [40]]
    assert [t.state for t in pair.both()] == [State.SUCCEEDED] * 2
