"""The death of a lead that an engine started for itself: everything of before fails once and comes back when it is at
rest, the pool keeps what it holds, and the engine goes on with the next lead.

The lead is a process that is killed. Memory is shared (the lead moved the bytes) or private (a rank in the test's own
process moves them).
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvgrpc.core.values.layout import Group, GroupKind, PoolKind, uniform_layout
from kvgrpc.engine import (
    BlocksReturned,
    Engine,
    Event,
    Failed,
    HandOver,
    LayersReceived,
    LeadDied,
    Pull,
    PullOpened,
    Push,
    Rank,
    Received,
    Reservation,
    Reserved,
    content,
    lead_restart as succession,
)
from kvgrpc.engine.handles import Handle
from kvgrpc.errors import InternalError, PreconditionFailed, Reason, Unavailable
from kvgrpc.v1 import admin_pb2
from tests.engine.conftest import SETTINGS
from tests.engine.made import layout
from tests.engine.support import WAIT_S, EngineProcess, Lead, Workers, ended, new_key, readable, refused, tokens
from tests.service.api import Api
from tests.service.conftest import TEST_S
from tests.service.engines import READY_S, wait_until

pytestmark = pytest.mark.timeout(TEST_S)

LAYERS, BLOCKS, LAYER_BYTES = 2, 128, 1 << 19
"""A MiB for each block: all of them take long enough for a kill in their middle."""
LAYOUT = uniform_layout(Group("full", GroupKind.FULL_ATTENTION, LAYERS, 16, BLOCKS, 64, 128, "float16"), LAYER_BYTES)
PROMPT = tokens(40)
SOURCE, TARGET = [1, 2, 9], [30, 31, 5]
CACHED = [100, 101, 127]
SLOW_BYTES_PER_S = 4e6
SLOW = ("--bandwidth-limit-bytes-per-s", str(SLOW_BYTES_PER_S))
MODES = ("shm", "cma", "nixl")


def slow(mode: str) -> Any:
    """A mode that runs with the slow tests."""
    return pytest.param(mode, marks=pytest.mark.slow)


class Side:
    """An engine with one rank, and its view of the pool, shape [layers, blocks, bytes]."""

    def __init__(self, engine: Engine, rank: Rank, view: NDArray[np.uint8]) -> None:
        self.engine, self.rank, self.view = engine, rank, view

    def fill(self, blocks: Sequence[int], seed: int) -> NDArray[np.uint8]:
        made = np.random.default_rng(seed).integers(0, 256, (LAYERS, len(blocks), LAYER_BYTES), dtype=np.uint8)
        self.view[:, list(blocks)] = made
        return made

    def read(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        return self.view[:, list(blocks)].copy()

    def until(self, done: Callable[[list[Event]], bool], timeout_s: float = WAIT_S) -> list[Event]:
        events: list[Event] = []

        def look() -> bool:
            events.extend(self.engine.poll(0.05))
            return done(events)

        wait_until(look, timeout_s, lambda: events)
        return events

    def until_it_lives_after(self, incarnation: int) -> list[Event]:
        """To its next life, for which a process starts."""
        return self.until(lambda _: self.engine.incarnation != incarnation, READY_S)

    def close(self) -> None:
        self.engine.close()
        self.rank.close()


def shared(engine: Engine) -> Side:
    rank = Rank(engine.ticket)
    return Side(engine, rank, rank.memory.reshape(LAYERS, BLOCKS, LAYER_BYTES))


def launched(mode: str, *flags: str, private: bool | None = None, relaunches: int = 100) -> Side:
    """An engine with a lead of its own, whose bytes move by one data path: shm with shared memory, else private."""
    flags = ("--data-paths", mode, *flags)
    private = mode != "shm" if private is None else private
    engine = Engine.launch(pool=LAYOUT, private_memory=private, flags=flags, relaunches=relaunches)
    if not private:
        return shared(engine)
    view = np.zeros((LAYERS, BLOCKS, LAYER_BYTES), dtype=np.uint8)
    limit = SLOW_BYTES_PER_S if SLOW[0] in flags else None
    rank = Rank(engine.ticket, 0, list(view), data_paths=(mode,), bandwidth_limit_bytes_per_s=limit)
    return Side(engine, rank, view)


@pytest.fixture(scope="module")
def peer(leads: tuple[Lead, Lead]) -> Iterator[Side]:
    """An engine that lives on, whose lead allows all data paths."""
    side = shared(Engine.attach(leads[0].socket_path, pool=LAYOUT))
    yield side
    side.close()


@pytest.fixture(scope="module")
def slow_peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    """One that reads so slowly that it is still at it when a lead is killed."""
    lead = Lead(tmp_path_factory.mktemp("slow"), "S", *SLOW, settings=SETTINGS).wait_ready()
    side = shared(Engine.attach(lead.socket_path, pool=LAYOUT))
    yield side
    side.close()
    lead.close()


@pytest.fixture(scope="module")
def sides() -> Iterator[Callable[..., Side]]:
    """Engines with leads of their own, made when they are first wanted; they outlive every kill."""
    made: dict[tuple[str, ...], Side] = {}
    with ExitStack() as stack:

        def get(*arguments: str) -> Side:
            if arguments not in made:
                made[arguments] = launched(*arguments)
                stack.callback(made[arguments].close)
            return made[arguments]

        yield get


def kill(side: Side) -> None:
    """kill -9 of the lead; it has ended then, and nobody but the kernel knows."""
    assert side.engine._lead is not None
    pidfd = os.pidfd_open(side.engine._lead.pid)
    os.kill(side.engine._lead.pid, signal.SIGKILL)
    assert ended(pidfd)
    os.close(pidfd)


def replaced(side: Side, *handles: Handle) -> list[Event]:
    """What the engine is told from a kill of its lead to its next life, in which all handles are over: of each one
    Failed, and then one BlocksReturned.
    """
    before = side.engine.incarnation
    kill(side)
    events = side.until_it_lives_after(before)
    check_ends(events, handles)
    return events


def poll_on(engine: Engine, events: list[Event]) -> None:
    """Until it raises."""
    while True:
        events += engine.poll(WAIT_S)


def check_ends(events: Sequence[Event], handles: Sequence[Handle]) -> None:
    """Of each one Failed, then BlocksReturned, and nothing about any other."""
    for handle in handles:
        assert handle.over
        told = [event for event in events if event.transfer is handle]
        failed, returned = (event for event in told if isinstance(event, Failed | BlocksReturned | Received))
        assert isinstance(failed, Failed), told
        assert failed.reason is Reason.ENGINE_LOST
        assert isinstance(returned, BlocksReturned), told
    known = {id(handle) for handle in handles}
    assert [event for event in events if id(event.transfer) not in known] == []


def move(source: Side, destination: Side, blocks: Sequence[int], into: Sequence[int]) -> None:
    """A pull, to its end, on both sides; the bytes are exact."""
    handover = source.engine.finished_blocks(blocks, content(PROMPT), transfer_key=new_key())
    source.engine.flush()
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start(into)
    events = destination.until(lambda _: pull.over)
    assert isinstance(events[-1], Received), events
    source.until(lambda _: handover.over)
    assert np.array_equal(destination.read(into), source.read(blocks))


def check_serves(side: Side, peer: Side) -> None:
    """The engine gives and takes in its new life; nothing of before is left at either lead."""
    side.fill([40, 41, 42], seed=40)
    move(side, peer, [40, 41, 42], [40, 41, 42])
    peer.fill([50, 51, 52], seed=50)
    move(peer, side, [50, 51, 52], [50, 51, 52])


@pytest.mark.parametrize("mode", ["shm", slow("cma")])
def test_an_idle_engine_gets_a_new_lead_and_keeps_what_is_in_its_pool(
    sides: Callable[..., Side], peer: Side, mode: str
) -> None:
    side = sides(mode)
    check_serves(side, peer)
    cached = side.fill(CACHED, seed=1)
    engine, ticket = side.engine, side.engine.ticket
    before = engine.incarnation, engine.address, engine.engine_id
    assert replaced(side) == []
    assert engine.incarnation != before[0]
    assert (engine.address, engine.engine_id, engine.ticket) == (*before[1:], ticket)
    assert engine._lead is not None
    assert engine.lead_pid == engine._lead.pid
    assert np.array_equal(side.read(CACHED), cached)
    check_serves(side, peer)
    move(side, peer, CACHED, [60, 61, 62])
    assert np.array_equal(peer.read([60, 61, 62]), cached)


def test_while_a_lead_is_replaced_nothing_waits_and_calls_are_refused(sides: Callable[..., Side]) -> None:
    side = sides("shm")
    descriptor, before = side.engine.fileno(), side.engine.incarnation
    handover = side.engine.finished_blocks(SOURCE, content(PROMPT), transfer_key=new_key())
    push = side.engine.push(content(PROMPT), transfer_key=new_key())  # its lead never hears of it
    kill(side)
    begun = time.monotonic()
    events, polls = list[Event](), list[float]()
    while side.engine.incarnation == before:
        at = time.monotonic()
        events += side.engine.poll()
        polls.append(time.monotonic() - at)
        if side.engine.incarnation == before:
            for call in (
                lambda: side.engine.finished_blocks(SOURCE, content(PROMPT), transfer_key=new_key()),
                lambda: side.engine.pull(handover.grant, content(PROMPT)),
                lambda: side.engine.reserve(TARGET, content(PROMPT), transfer_key=new_key()),
                lambda: side.engine.cancel(new_key()),
                lambda: push.finished(SOURCE),
                lambda: side.engine.allocate(1),
            ):
                with refused(Reason.ENGINE_LOST, Unavailable):
                    call()
            assert handover.take_back()
            handover.cancel()
            assert readable(READY_S, descriptor)
    assert len(polls) > 2
    assert max(polls) < (time.monotonic() - begun) / 2
    assert side.engine.fileno() == descriptor
    assert [type(event) for event in events if event.transfer is handover] == [Failed, BlocksReturned]
    assert not handover.take_back()
    push.finished(SOURCE, last=True)
    push.fail("nobody wants it")
    side.until(lambda _: push.over)


@pytest.mark.parametrize("mode", ["shm", "cma", slow("nixl")])
def test_hand_overs_fail_and_come_back_whether_the_lead_knew_them_or_not(
    sides: Callable[..., Side], peer: Side, mode: str
) -> None:
    side = sides(mode)
    made = side.fill(SOURCE, seed=2)
    known = side.engine.finished_blocks(SOURCE, content(PROMPT), transfer_key=new_key())
    offer = peer.engine.finished_blocks(SOURCE, content(PROMPT), transfer_key=new_key())
    peer.engine.flush()
    pull = side.engine.pull(offer.grant, content(PROMPT))
    side.until(lambda events: any(isinstance(event, PullOpened) for event in events))  # it waits for blocks
    unsent = side.engine.finished_blocks([3, 4, 5], content(PROMPT), transfer_key=new_key())
    replaced(side, known, unsent, pull)
    with refused(Reason.TRANSFER_ENDED, PreconditionFailed):
        pull.start(TARGET)
    assert np.array_equal(side.read(SOURCE), made)
    offer.cancel()
    late = peer.engine.pull(known.grant, content(PROMPT))  # of a lead that is no more
    check_serves(side, peer)
    late.cancel()
    peer.until(lambda _: late.over)


@pytest.mark.parametrize("mode", ["shm", slow("cma"), slow("nixl")])
def test_a_peer_that_reads_from_an_engine_whose_lead_dies_uses_nothing_of_it(
    sides: Callable[..., Side], peer: Side, slow_peer: Side, mode: str
) -> None:
    side = sides(mode)
    slow_peer.view[:, TARGET] = 0
    side.fill(SOURCE, seed=3)
    handover = side.engine.finished_blocks(SOURCE, content(PROMPT), transfer_key=new_key())
    side.engine.flush()
    pull = slow_peer.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    slow_peer.engine.flush()
    wait_until(lambda: bool(slow_peer.view[:, TARGET].any()))
    replaced(side, handover)
    side.fill(SOURCE, seed=4)  # they are its own
    check_serves(side, peer)
    events = slow_peer.until(lambda _: pull.over)
    assert [type(event) for event in events if event.transfer is pull][-2:] == [Failed, BlocksReturned]


def _is_over(handle: Handle) -> Callable[[list[Event]], bool]:
    return lambda _: handle.over


def in_flight(source: Side, destination: Side, blocks: list[int], prompt: list[int]) -> tuple[HandOver, Pull]:
    """A pull whose first bytes have come, and whose last ones, as far as anybody knows, have not."""
    while True:
        destination.view[:, blocks] = 0
        handover = source.engine.finished_blocks(blocks, content(prompt), transfer_key=new_key())
        source.engine.flush()
        pull = destination.engine.pull(handover.grant, content(prompt))
        pull.start(blocks)
        while not (destination.view[:, 0, 0].any() or pull.over):
            destination.engine.poll()
        if not pull.over:
            return handover, pull
        source.until(_is_over(handover))


def begun(source: Side, destination: Side, blocks: list[int], prompt: list[int]) -> tuple[Push, Reservation]:
    """A push into these blocks whose two sides know each other."""
    key = new_key()
    target = destination.engine.reserve(blocks, content(prompt), transfer_key=key)
    destination.until(lambda events: Reserved(target) in events)
    push = source.engine.push(content(prompt), transfer_key=key)
    push.register(target.grant)
    return push, target


def push_in_flight(source: Side, destination: Side, blocks: list[int], prompt: list[int]) -> tuple[Push, Reservation]:
    """As `in_flight`, of a push, which the destination moves, too."""
    while True:
        destination.view[:, blocks] = 0
        push, target = begun(source, destination, blocks, prompt)
        push.finished(blocks, last=True)
        source.engine.flush()
        while not (destination.view[:, 0, 0].any() or target.over):
            destination.engine.poll()
        if not target.over:
            return push, target
        source.until(_is_over(push))


@pytest.mark.parametrize("begin", [in_flight, pytest.param(push_in_flight, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
def test_no_late_byte_of_what_is_in_flight_lands_in_blocks_that_came_back(
    sides: Callable[..., Side], peer: Side, mode: str, begin: Callable[..., tuple[Handle, Handle]]
) -> None:
    side = sides(mode, *SLOW)
    cached, blocks = side.fill(CACHED, seed=5), list(range(100))
    peer.view[:, blocks] = 0xAA
    many = tokens(1600)
    check_serves(side, peer)
    sending, receiving = begin(peer, side, blocks, many)
    assert not side.view[:, blocks].all(), "most of it is to come"
    replaced(side, receiving)
    side.view[:, blocks] = 0x55
    sending.cancel()
    peer.until(lambda _: sending.over)
    check_serves(side, peer)
    wanted = sorted({*blocks} - {40, 41, 42, 50, 51, 52})
    assert (side.view[:, wanted] == 0x55).all()
    assert np.array_equal(side.read(CACHED), cached)


@pytest.mark.parametrize("mode", ["shm", slow("cma"), slow("nixl")])
def test_what_was_reserved_for_a_push_and_what_was_pushed_fails_and_comes_back(
    sides: Callable[..., Side], peer: Side, mode: str
) -> None:
    side = sides(mode)
    side.fill(SOURCE, seed=6)
    peer.view[:, TARGET] = 0
    reserved = side.engine.reserve(TARGET, content(PROMPT), transfer_key=new_key())
    never_sent = side.engine.push(content(PROMPT), transfer_key=new_key())
    never_sent.finished([10, 11, 12], last=True)
    between = side.engine.push(content(PROMPT), transfer_key=new_key())
    target = peer.engine.reserve(TARGET, content(PROMPT), transfer_key=between.transfer_key)
    assert Reserved(target) in peer.until(bool)
    between.register(target.grant)
    between.finished(SOURCE[:2])
    side.until(lambda _: bool(between.transfer_id))
    wait_until(lambda: bool(peer.view[1, TARGET[1]].any()))
    events = replaced(side, reserved, never_sent, between)
    assert Reserved(reserved) not in events
    check_serves(side, peer)
    target.cancel()
    peer.until(lambda _: target.over)


@pytest.mark.parametrize("mode", ["shm", slow("cma"), slow("nixl")])
def test_layers_that_were_received_before_their_lead_died_are_of_a_push_that_failed(
    sides: Callable[..., Side], peer: Side, mode: str
) -> None:
    side = sides(mode)
    push, target = begun(peer, side, TARGET, PROMPT)
    peer.fill(SOURCE, seed=7)
    push.finished(SOURCE, layers=(0, 1))
    peer.engine.flush()
    side.until(lambda events: any(isinstance(event, LayersReceived) for event in events))
    replaced(side, target)
    side.fill(TARGET, seed=8)
    kept = side.read(TARGET)
    check_serves(side, peer)
    assert np.array_equal(side.read(TARGET), kept)


@pytest.mark.parametrize("speaker", ["worker", "scheduler"])
def test_steps_that_were_reported_hold_nothing_back_in_the_next_life(
    sides: Callable[..., Side], peer: Side, speaker: str
) -> None:
    side = sides("shm" if speaker == "worker" else "cma")
    who = side.rank if speaker == "worker" else side.engine
    who.step_done(49)
    before = side.engine.incarnation
    kill(side)
    side.engine.poll()
    who.step_done(50)
    side.until_it_lives_after(before)
    handover = side.engine.finished_blocks(SOURCE, content(PROMPT), transfer_key=new_key(), after_step=50)
    side.engine.flush()
    pull = peer.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    assert isinstance(peer.until(lambda _: pull.over)[-1], Received)
    side.until(lambda _: handover.over)


def test_a_lead_that_is_killed_while_it_starts_is_replaced_too(sides: Callable[..., Side], peer: Side) -> None:
    side = sides("shm")
    lead = side.engine._lead
    assert lead is not None
    cached = side.fill(CACHED, seed=9)
    handover = side.engine.finished_blocks(SOURCE, content(PROMPT), transfer_key=new_key())
    before, first = side.engine.incarnation, lead.pid
    kill(side)
    events = side.until(lambda _: lead.pid != first)
    second = lead.pid
    kill(side)
    events += side.until_it_lives_after(before)
    check_ends(events, [handover])
    assert lead.pid not in (first, second)
    assert np.array_equal(side.read(CACHED), cached)
    check_serves(side, peer)


def test_a_lead_that_stands_still_is_ended_and_replaced(sides: Callable[..., Side], peer: Side) -> None:
    side = sides("shm")
    assert side.engine._lead is not None
    before, stopped = side.engine.incarnation, side.engine._lead.pid
    os.kill(stopped, signal.SIGSTOP)
    side.engine._lives._session.connection.shutdown()  # as after a send that nobody read
    side.until_it_lives_after(before)
    assert side.engine._lead.pid != stopped
    check_serves(side, peer)


def test_too_many_deaths_end_the_engine(peer: Side) -> None:
    side = launched("shm", relaunches=1)
    try:
        replaced(side)
        check_serves(side, peer)
        kill(side)
        for _ in range(2):
            with pytest.raises(LeadDied, match="1 leads were started anew within 60 s"):
                side.until(lambda _: False)
        with pytest.raises(LeadDied):
            side.engine.flush()
    finally:
        side.close()
    with pytest.raises(LeadDied):
        side.rank.step_done(1)


def test_a_lead_that_was_started_anew_is_not_left_behind_when_its_engine_is_killed() -> None:
    process = EngineProcess("launch")
    first = process.answer()["lead"]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: process.ask(op="poll") != first, READY_S)
    pidfd = os.pidfd_open(process.ask(op="poll"))
    process.kill()
    process.close()
    assert ended(pidfd)
    os.close(pidfd)


def test_a_pool_that_the_server_manages_dies_with_its_lead() -> None:
    with Engine.launch(pool=LAYOUT, kind=PoolKind.SERVER_MANAGED, flags=["--data-paths", "shm"]) as engine:
        assert engine.ticket.comes_back_s == 0
        assert engine._lead is not None
        os.kill(engine._lead.pid, signal.SIGKILL)
        with pytest.raises(LeadDied, match="exit code -9"):
            poll_on(engine, [])


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    """A peer that writes what it pushes, slowly."""
    flags = ("--data-paths", "nixl", "--source-writes", *SLOW)
    lead = Lead(tmp_path_factory.mktemp("writer"), "W", *flags, settings=SETTINGS).wait_ready()
    side = shared(Engine.attach(lead.socket_path, pool=LAYOUT))
    yield side
    side.close()
    lead.close()


@pytest.mark.parametrize(
    "private", [pytest.param(False, id="shared"), pytest.param(True, id="private", marks=pytest.mark.slow)]
)
def test_memory_that_a_peer_may_still_write_keeps_its_engine_from_coming_back(writer: Side, private: bool) -> None:
    """By CMA the peer's process writes, and needs nothing of this one: a death here proves nothing."""
    side = launched("nixl", private=private)
    try:
        push, target = begun(writer, side, TARGET, PROMPT)
        push.finished(SOURCE, last=True)
        writer.engine.flush()
        events = side.until(lambda _: target.over)
        assert isinstance(events[-1], Received)
        writer.until(lambda _: push.over)
        replaced(side)  # what was written is over
        writer.fill(SOURCE, seed=10)
        side.view[:, TARGET] = 0
        push, target = begun(writer, side, TARGET, PROMPT)
        push.finished(SOURCE, last=True)
        writer.engine.flush()
        wait_until(lambda: bool(side.view[:, TARGET].any()))
        kill(side)
        told: list[Event] = []
        with pytest.raises(LeadDied, match="not proved to be at rest"):
            poll_on(side.engine, told)
        assert not target.over
        push.cancel()
        writer.until(lambda _: push.over)
    finally:
        side.engine.close()
        with suppress(InternalError):
            side.rank.close()


@pytest.mark.slow
def test_what_an_engine_writes_itself_is_its_own_again_only_when_no_posting_reads_it_any_more(peer: Side) -> None:
    """Its lead dies in the middle of its write. Its destination has its blocks back at an operator's word: by CMA
    nothing else than the end of this process proves to it that nothing follows.
    """
    side = launched("nixl", "--source-writes", *SLOW)
    try:
        blocks, spare = list(range(100)), [110, 111, 112]
        made = side.fill(blocks, seed=12)
        peer.view[:, blocks] = 0
        push, target = begun(side, peer, blocks, tokens(1600))
        push.finished(blocks, last=True)
        side.engine.flush()
        wait_until(lambda: bool(peer.view[:, blocks].any()))
        assert not peer.view[:, blocks].all(), "most of it is to come"
        replaced(side, push)
        side.view[:, blocks] = 0x55
        move(side, peer, spare, spare)  # another life: the last one is over
        peer.until(lambda _: target.failed)
        assert not target.over
        word = admin_pb2.ReleaseQuarantineRequest(force=True, message="its worker has closed its data paths")
        with closing(Api(peer.engine.address)) as api:
            assert api.admin.ReleaseQuarantine(word).released_blocks == len(blocks)
        peer.until(lambda _: target.over)
        found = peer.read(blocks)
        assert ((found == made) | (found == 0)).all()
    finally:
        side.close()


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.close()


def test_a_worker_that_dies_ends_the_engine_though_it_has_a_lead_of_its_own() -> None:
    side = launched("shm")
    assert side.engine._lead is not None
    first = side.engine._lead.pid
    side.rank.close()
    for _ in range(2):
        with pytest.raises(LeadDied, match="the worker of rank 0 is gone"):
            poll_on(side.engine, [])
    assert side.engine._lead.pid == first
    side.close()


def test_a_worker_that_dies_with_its_lead_ends_the_engine(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "WORKERS_S", 0.5)
    one, two = workers.make(), workers.make()
    with Engine.launch(pool=layout(), private_memory=True, world_size=2, flags=["--data-paths", "cma"]) as engine:
        for rank, worker in enumerate((one, two)):
            ticket = engine.ticket
            worker.send(
                op="attach", socket_path=ticket.socket_path, secret=ticket.secret.hex(), data_paths=["cma"], rank=rank,
                memory_bytes=ticket.memory_bytes, comes_back_s=ticket.comes_back_s,
            )  # fmt: skip
            assert worker.answer() == "attached"
        assert engine._lead is not None
        handover = engine.finished_blocks([1, 2], content(PROMPT[:32]), transfer_key=new_key())
        engine.flush()
        two.kill()
        os.kill(engine._lead.pid, signal.SIGKILL)
        events: list[Event] = []
        with pytest.raises(LeadDied):
            poll_on(engine, events)
        assert not any(isinstance(event, BlocksReturned) for event in events)
        assert not handover.over
