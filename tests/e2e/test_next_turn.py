"""The next turn of a conversation: P takes from D what it lacks, and gives the longer prompt back.

Also several destinations of one hand-over: who counts as done when one of them aborts, fails or dies.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from kvgrpc.v1 import common_pb2, handoff_pb2, lease_pb2, transfer_pb2
from tests.e2e.conftest import PATHS, Pair, begin
from tests.e2e.pushing import LIMITS, SLOW
from tests.service.conftest import SETTINGS, Start, starting
from tests.service.engines import (
    CANCELLED,
    FAILED,
    RETURNED,
    SUCCEEDED,
    Engine,
    wait_until,
)
from tests.service.pushes import finish, reason_of, register, reserve, wait_active
from tests.service.values import dur, new_key, prompt

RELEASE, KEEP = common_pb2.ON_ABORT_RELEASE, common_pb2.ON_ABORT_KEEP
LIVE, DONE = lease_pb2.LEASE_STATE_LIVE, lease_pb2.LEASE_STATE_DONE
FIRST_TURN, ANSWERED, SECOND_TURN = prompt(100), prompt(160), prompt(200)
"""A prompt, the prompt with D's answer, and both with the user's next message: 7, 10 and 13 blocks of 16 tokens."""
ABORTED = pytest.mark.parametrize("on_abort", [RELEASE, KEEP], ids=["RELEASE", "KEEP"])


# ---- D to P and back


def push(
    source: Engine, destination: Engine, tokens: list[int], blocks: list[int], target: list[int], have: int
) -> None:
    """Pushes until both sides have succeeded."""
    key = new_key()
    reserved = reserve(destination, key, tokens, target, have_tokens=have)
    register(source, reserved.grant)
    sent = finish(source, key, tokens, blocks)
    assert destination.wait(reserved.transfer.transfer_id).state == SUCCEEDED
    assert source.wait(sent.transfer.transfer_id).state == SUCCEEDED


def pull(
    source: Engine, destination: Engine, tokens: list[int], blocks: list[int], target: list[int], have: int
) -> None:
    """Pulls until both sides have succeeded."""
    handed = source.hand_over(tokens, blocks)
    pulled = destination.pull(handed.grant, tokens, None)
    give(destination, pulled.transfer_id, target, have)
    assert destination.wait(pulled.transfer_id).state == SUCCEEDED
    assert source.wait(handed.transfer.transfer_id).state == SUCCEEDED


def give(engine: Engine, transfer_id: str, blocks: list[int], have_tokens: int) -> None:
    request = handoff_pb2.PullBlocksRequest(transfer_id=transfer_id, destination=engine.into(blocks, have_tokens))
    engine.api.handoff.PullBlocks(request)


@pytest.fixture(
    scope="module",
    params=[
        "shm",
        "nixl",
        *(pytest.param(path, marks=pytest.mark.slow) for path in PATHS if path not in ("shm", "nixl")),
    ],
)
def talkers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Yields P and D, over each data path."""
    with starting(tmp_path_factory.mktemp("talkers")) as start:
        yield begin(start, request.param)


@pytest.mark.parametrize("back", [push, pull])
def test_the_next_turn_takes_from_d_what_p_lacks_and_goes_back_to_d(talkers: Pair, back: Any) -> None:
    p, d = talkers
    lives = p.incarnation(), d.incarnation()
    # First turn: P's seven blocks go to D, which continues in the last of them and in three more.
    at_p, at_d = p.allocate(13), d.allocate(13)
    of_p = p.write(at_p[:7], seed=1)
    push(p, d, FIRST_TURN, at_p[:7], at_d[:7], have=0)
    assert d.read(at_d[:7]) == of_p
    of_d = d.write(at_d[6:10], seed=2)
    # D offers everything; the lease lives while somebody waits for it.
    offered = d.hand_over(ANSWERED, at_d[:10], ttl=dur(0.3))
    # P has kept six whole blocks. It uses nine blocks of the offer.
    pulled = p.pull(offered.grant, SECOND_TURN, None, use_tokens=144)
    wait_until(lambda: d.lease(offered.lease.lease_id).renewal_count >= 4, what=lambda: d.lease(offered.lease.lease_id))
    assert d.lease(offered.lease.lease_id).state == LIVE
    give(p, pulled.transfer_id, at_p[6:9], 96)
    end = p.wait(pulled.transfer_id)
    assert (end.state, end.use_tokens, end.block_count) == (SUCCEEDED, 144, 3)
    assert p.read(at_p[6:9]) == of_d[:3]
    assert d.wait(offered.transfer.transfer_id).state == SUCCEEDED
    assert d.counts().pinned_block_count == 0
    # P computes the rest of the prompt, and D gets what it lacks.
    new = p.write(at_p[9:], seed=3)
    back(p, d, SECOND_TURN, at_p, at_d[10:], have=160)
    assert d.read(at_d) == [*of_p[:6], *of_d, *new[1:]]
    assert (p.incarnation(), d.incarnation()) == lives
    assert (p.counts().pinned_block_count, d.counts().pinned_block_count) == (0, 0)
    for engine in talkers:
        engine.reset()


def test_a_conversation_that_diverges_takes_what_comes_before(talkers: Pair) -> None:
    p, d = talkers
    at_d = d.allocate(10)
    of_d = d.write(at_d, seed=1)
    offered = d.hand_over(ANSWERED, at_d, on_abort=KEEP)
    edited = [*ANSWERED[:130], *prompt(70, seed=1)]
    target = p.allocate(12)
    for use_tokens, state in ((144, FAILED), (128, SUCCEEDED)):
        pulled = p.pull(offered.grant, edited, target[: use_tokens // 16], use_tokens=use_tokens)
        assert p.wait(pulled.transfer_id).state == state
    assert p.read(target[:8]) == of_d[:8]
    for engine in talkers:
        engine.reset()


# ---- one hand-over, two destinations


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine, Engine]]:
    """Yields a source and two destinations, of which the first is slow."""
    with starting(tmp_path_factory.mktemp("engines")) as start:
        source, first, second = start((), SLOW, (), settings=SETTINGS)
        yield source, first, second


@pytest.fixture
def trio(engines: tuple[Engine, Engine, Engine]) -> Iterator[tuple[Engine, Engine, Engine]]:
    yield engines
    for engine in reversed(engines):
        engine.reset()


class Offer:
    """Blocks that a source offers to several consumers."""

    def __init__(self, source: Engine, **fields: Any) -> None:
        self.source = source
        self.tokens = prompt(256)
        self.blocks = source.allocate(16)
        self.written = source.write(self.blocks, seed=7)
        handed = source.hand_over(self.tokens, self.blocks, **fields)
        self.grant, self.lease_id, self.transfer_id = handed.grant, handed.lease.lease_id, handed.transfer.transfer_id

    @property
    def lease(self) -> lease_pb2.Lease:
        return self.source.lease(self.lease_id)

    def stands(self, consumers_done: int) -> None:
        """Checks that the blocks are still there for the consumers that are not done."""
        wait_until(lambda: self.lease.open_access_count == 0, what=lambda: self.lease)
        assert (self.lease.state, self.lease.done_consumer_count) == (LIVE, consumers_done)
        assert self.source.counts().pinned_block_count == len(self.blocks)
        assert self.source.get(self.transfer_id).state not in (SUCCEEDED, FAILED, CANCELLED)

    def over(self, state: int, consumers_done: int) -> None:
        """Checks that the last consumer has ended it."""
        end = self.source.wait(self.transfer_id)
        assert (end.state, end.memory, end.done_consumer_count) == (state, RETURNED, consumers_done)
        assert self.lease.state == DONE
        assert self.source.counts().pinned_block_count == 0

    def begin(self, engine: Engine, **fields: Any) -> str:
        """Begins a pull of it into allocated blocks."""
        return engine.pull(self.grant, self.tokens, engine.allocate(16), **fields).transfer_id

    def arrives_at(self, engine: Engine) -> None:
        target = engine.allocate(16)
        end = engine.wait(engine.pull(self.grant, self.tokens, target).transfer_id)
        assert end.state == SUCCEEDED, end
        assert engine.read(target) == self.written

    def is_given_up_by(self, engine: Engine) -> None:
        """Cancels a pull of it there while bytes move."""
        transfer_id = self.begin(engine)
        wait_active(engine, transfer_id)
        engine.cancel(transfer_id, "the user left", scope=transfer_pb2.CANCEL_SCOPE_ON_ABORT)
        assert engine.wait(transfer_id).state == CANCELLED


Trio = tuple[Engine, Engine, Engine]


def test_blocks_live_until_both_consumers_have_them(trio: Trio) -> None:
    source, first, second = trio
    offer = Offer(source, consumer_count=2)
    offer.arrives_at(first)
    offer.stands(consumers_done=1)
    offer.arrives_at(second)
    offer.over(SUCCEEDED, consumers_done=2)


def test_a_consumer_that_comes_twice_is_one_consumer(trio: Trio) -> None:
    source, first, second = trio
    offer = Offer(source, consumer_count=2)
    for _ in range(2):
        offer.arrives_at(second)
        offer.stands(consumers_done=1)
    offer.arrives_at(first)
    offer.over(SUCCEEDED, consumers_done=2)


def test_two_consumers_at_once_get_the_same_bytes(trio: Trio) -> None:
    source, first, second = trio
    offer = Offer(source, consumer_count=2)
    slow = offer.begin(first)
    wait_active(first, slow)
    offer.arrives_at(second)
    assert first.wait(slow).state == SUCCEEDED
    offer.over(SUCCEEDED, consumers_done=2)


def test_a_consumer_that_aborts_under_release_is_done(trio: Trio) -> None:
    source, first, second = trio
    offer = Offer(source, consumer_count=2, on_abort=RELEASE)
    offer.is_given_up_by(first)
    offer.stands(consumers_done=1)
    offer.arrives_at(second)
    offer.over(SUCCEEDED, consumers_done=2)


def test_a_consumer_that_aborts_under_keep_may_come_again_or_leave_it_to_another(trio: Trio) -> None:
    source, first, second = trio
    offer = Offer(source, consumer_count=2, on_abort=KEEP)
    offer.is_given_up_by(first)
    offer.stands(consumers_done=0)
    offer.arrives_at(second)
    offer.stands(consumers_done=1)
    offer.arrives_at(first)
    offer.over(SUCCEEDED, consumers_done=2)


def test_an_offer_that_every_consumer_gives_up_under_release_ends_as_cancelled(trio: Trio) -> None:
    source, first, second = trio
    offer = Offer(source, consumer_count=2, on_abort=RELEASE)
    for engine in (first, second):
        waiting = engine.pull(offer.grant, offer.tokens, None).transfer_id
        wait_until(lambda: offer.lease.open_access_count == 1, what=lambda: offer.lease)
        engine.cancel(waiting, scope=transfer_pb2.CANCEL_SCOPE_ON_ABORT)
        wait_until(lambda: offer.lease.open_access_count == 0, what=lambda: offer.lease)
    offer.over(CANCELLED, consumers_done=2)


@ABORTED
def test_a_consumer_that_failed_leaves_the_offer_to_another(trio: Trio, on_abort: Any) -> None:
    source, first, second = trio
    offer = Offer(source, on_abort=on_abort)
    failed = first.wait(offer.begin(first, transfer_timeout=dur(0.05)))
    assert (failed.state, reason_of(failed)) == (FAILED, "TRANSFER_TIMEOUT")
    offer.stands(consumers_done=0)
    offer.arrives_at(second)
    offer.over(SUCCEEDED, consumers_done=1)


@ABORTED
def test_a_consumer_that_is_killed_is_done_under_release_and_replaced_under_keep(start: Start, on_abort: Any) -> None:
    source, first, second, third = start((), SLOW, (), (), settings=LIMITS)
    offer = Offer(source, consumer_count=2, on_abort=on_abort, ttl=dur(60))
    wait_active(first, offer.begin(first))
    first.process.kill()
    offer.stands(consumers_done=1 if on_abort == RELEASE else 0)
    offer.arrives_at(second)
    if on_abort == KEEP:
        offer.stands(consumers_done=1)
        offer.arrives_at(third)
    offer.over(SUCCEEDED, consumers_done=2)
