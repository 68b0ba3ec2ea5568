"""WatchTransfers reports every change once, in order, from now or from a watcher's last position."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from hypothesis import given, strategies as st

from kvgrpc.config import Config, PoolConfig
from kvgrpc.core.events import FinishedBlocks
from kvgrpc.errors import Exhausted, NotFound, Reason
from kvgrpc.server import Server
from kvgrpc.service.rpc.transfer import TransferService
from kvgrpc.service.watchers import (
    PROGRESS_SHARE,
    WATCH_BACKLOG_MAX,
    WATCHES_MAX,
    WATCHES_OF_CONNECTION_MAX as EACH_MAX,
    TransferWatcher,
)
from kvgrpc.v1 import pool_pb2, transfer_pb2
from kvgrpc.wire import requests
from tests.service.api import Api, read_refusal
from tests.service.conftest import SETTINGS, Start
from tests.service.engines import CANCELLED, FAILED, Engine, wait_until
from tests.service.values import content, for_readers, group, named_blocks, new_key, prompt

WATCH = "/kvgrpc.v1.TransferService/WatchTransfers"
Stream = Iterator[transfer_pb2.WatchTransfersResponse]


@contextmanager
def watching(engine: Engine, **fields: Any) -> Iterator[Stream]:
    stream = engine.api.transfers.WatchTransfers(transfer_pb2.WatchTransfersRequest(**fields), timeout=30)
    try:
        yield stream
    finally:
        stream.cancel()


def until(watch: Stream, seq: int) -> list[transfer_pb2.WatchTransfersResponse]:
    """Returns the messages up to the change with that number."""
    found = []
    for message in watch:
        found.append(message)
        if message.transfer.event_seq >= seq:
            break
    return found


def refused_watch(engine: Engine, **fields: Any) -> tuple[str, str]:
    with watching(engine, **fields) as watch, pytest.raises(grpc.RpcError) as caught:
        next(watch)
    refusal = read_refusal(WATCH, caught.value)
    return refusal.code, refusal.reason


def last_seq(engine: Engine) -> int:
    reply = engine.api.transfers.ListTransfers(transfer_pb2.ListTransfersRequest(page_size=1))
    return reply.header.event_seq


def test_the_first_message_only_tells_that_the_watch_is_open(source: Engine) -> None:
    source.hand_over(prompt(16))
    with watching(source) as watch:
        first = next(watch)
    assert not first.HasField("transfer")
    assert not first.history_lost
    assert first.header.event_seq == last_seq(source)


def test_a_watch_tells_every_change_once_in_order(source: Engine) -> None:
    with watching(source) as watch:
        start = next(watch).header.event_seq
        handed = [source.hand_over(prompt(16)) for _ in range(3)]
        for reply in handed:
            source.release(reply.lease.lease_id)
        changes = until(watch, last_seq(source))
    assert [c.transfer.event_seq for c in changes] == list(range(start + 1, last_seq(source) + 1))
    assert [c.header.event_seq for c in changes] == [c.transfer.event_seq for c in changes]
    ids = [reply.transfer.transfer_id for reply in handed]
    assert [c.transfer.transfer_id for c in changes if c.transfer.state == CANCELLED] == ids
    assert [
        c.transfer.transfer_id for c in changes if c.transfer.waiting_for == transfer_pb2.WAITING_FOR_READERS
    ] == ids


def test_a_watch_that_resumes_gets_exactly_what_came_after(source: Engine) -> None:
    source.hand_over(prompt(16))
    listed = source.api.transfers.ListTransfers(transfer_pb2.ListTransfersRequest(page_size=1)).header
    missed = source.hand_over(prompt(16)).transfer
    with watching(source, after_event_seq=listed.event_seq, incarnation=listed.incarnation) as watch:
        assert not next(watch).history_lost
        change = next(watch)
        assert change.transfer.transfer_id == missed.transfer_id
        assert change.transfer.event_seq == listed.event_seq + 1
        later = source.hand_over(prompt(16)).transfer
        assert next(watch).transfer.transfer_id == later.transfer_id


def test_a_watch_with_a_filter_tells_only_changes_that_match(source: Engine) -> None:
    label = new_key().hex()
    wanted = transfer_pb2.TransferFilter(request_id=label, states=[CANCELLED])
    with watching(source, filter=wanted) as watch:
        next(watch)
        other, mine = source.hand_over(prompt(16)), source.hand_over(prompt(16), request_id=label)
        for reply in (other, mine):
            source.release(reply.lease.lease_id)
        change = next(watch)
    assert change.transfer.transfer_id == mine.transfer.transfer_id
    assert change.transfer.state == CANCELLED


def test_a_past_that_is_gone_is_said_first(start: Start) -> None:
    (engine,) = start((), settings=SETTINGS + "transfer_history = 4\n")
    handed = [engine.hand_over(prompt(16)) for _ in range(8)]
    incarnation = engine.incarnation()
    with watching(engine, after_event_seq=1, incarnation=incarnation) as watch:
        assert next(watch).history_lost
        engine.release(handed[0].lease.lease_id)
        assert next(watch).transfer.transfer_id == handed[0].transfer.transfer_id
    with watching(engine, after_event_seq=last_seq(engine) - 4, incarnation=incarnation) as watch:
        assert not next(watch).history_lost
        assert len(until(watch, last_seq(engine))) == 4


def test_a_watch_that_resumes_starts_where_it_left_off_and_says_when_the_past_is_told(source: Engine) -> None:
    """Every message, also the first one, says where to resume."""
    before = source.api.transfers.ListTransfers(transfer_pb2.ListTransfersRequest(page_size=1)).header
    source.hand_over(prompt(16))
    nothing = transfer_pb2.TransferFilter(request_id=new_key().hex())
    with watching(source, after_event_seq=before.event_seq, incarnation=before.incarnation, filter=nothing) as watch:
        first, told = next(watch), next(watch)
    assert first.header.event_seq == before.event_seq
    assert told.header.event_seq == last_seq(source) > before.event_seq
    assert not first.HasField("transfer")
    assert not told.HasField("transfer")


def test_a_watch_for_which_nothing_matches_can_still_resume_after_many_changes(start: Start) -> None:
    (engine,) = start((), settings=SETTINGS + "transfer_history = 8\n")
    nothing = transfer_pb2.TransferFilter(request_id=new_key().hex())
    with watching(engine, filter=nothing) as watch:
        start_seq = next(watch).header.event_seq
        for _ in range(20):
            engine.hand_over(prompt(16))
        seen = [next(watch)]
        while seen[-1].header.event_seq <= last_seq(engine) - 8 // PROGRESS_SHARE:
            seen.append(next(watch))
    seqs = [message.header.event_seq for message in seen]
    assert seqs == sorted(set(seqs))
    assert seqs[0] > start_seq
    assert not any(message.HasField("transfer") or message.history_lost for message in seen)
    with watching(engine, filter=nothing, after_event_seq=seqs[-1], incarnation=engine.incarnation()) as watch:
        assert not next(watch).history_lost


def test_a_watch_after_a_repeated_answer_tells_what_happened_since_the_first(source: Engine) -> None:
    request = for_readers(
        idempotency_key=new_key().hex(),
        transfer_key=new_key(),
        blocks=source.blocks(source.allocate(1)),
        content=content(prompt(16)),
    )
    first = source.api.handoff.FinishedBlocks(request)
    source.release(first.lease.lease_id)
    again = source.api.handoff.FinishedBlocks(request)
    assert again.header == first.header
    header = again.header
    with watching(source, after_event_seq=header.event_seq, incarnation=header.incarnation) as watch:
        next(watch)
        assert next(watch).transfer.state == CANCELLED


def test_a_number_of_another_life_is_refused(source: Engine) -> None:
    assert refused_watch(source, after_event_seq=1, incarnation=1) == ("ABORTED", "INCARNATION_CHANGED")


def test_a_number_is_of_a_life_that_is_stated_and_has_been_reached(source: Engine) -> None:
    life = source.incarnation()
    for wrong in ({"after_event_seq": 1}, {"after_event_seq": 2**53 - 1, "incarnation": life}):
        assert refused_watch(source, **wrong) == ("INVALID_ARGUMENT", "INVALID_FIELD")


def test_watches_are_bounded_and_one_that_ends_makes_room(source: Engine) -> None:
    with ExitStack() as stack:
        callers = [stack.enter_context(closing(Api(source.address))) for _ in range(2 + WATCHES_MAX // EACH_MAX)]
        watches = [_as_many_as_stand(api) for api in callers]
        assert [len(of_one) for of_one in watches[:2]] == [EACH_MAX, EACH_MAX]
        assert all(watches)
        assert sum(map(len, watches)) <= WATCHES_MAX
        for watch in watches[0]:
            watch.cancel()
        wait_until(lambda: bool(_as_many_as_stand(callers[-1])))
    wait_until(lambda: _stands(source))


def _as_many_as_stand(api: Api) -> list[Any]:
    """Opens watches until one is refused, and returns those that stand."""
    standing = []
    while (watch := _opened(api)) is not None:
        standing.append(watch)
    return standing


def _opened(api: Api) -> Any:
    """Returns a watch that stands; None if it is refused."""
    watch = api.transfers.WatchTransfers(transfer_pb2.WatchTransfersRequest(), timeout=60)
    try:
        next(watch)
    except grpc.RpcError as error:
        refusal = read_refusal(WATCH, error)
        if (refusal.code, refusal.reason) != ("RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED"):
            raise
        return None
    return watch


def _stands(engine: Engine) -> bool:
    with watching(engine) as watch:
        try:
            next(watch)
        except grpc.RpcError:
            return False
    return True


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """Yields a server in this process, for rules about events between two of its steps."""
    config = Config(listen="127.0.0.1:0", data_paths=("shm",), pool=PoolConfig(blocks=8, layers=1))
    server = Server(config)
    await server.start()
    yield server
    await server.stop()


async def hand_over(server: Server) -> None:
    """Causes a change now."""
    lead = server._lead
    call = lead.runner.next_call_id()
    allocation = pool_pb2.AllocateBlocksRequest(group_block_counts=[pool_pb2.GroupBlockCount(block_count=1)])
    made = requests.make_call(call, "test", "", "AllocateBlocks", allocation)
    allocated: Any = (await lead.runner.ask(call, requests.allocate_blocks(allocation, made))).answer
    call = lead.runner.next_call_id()
    request = for_readers(
        transfer_key=new_key(),
        blocks=named_blocks(lead.runner.node.state.life.incarnation, group(allocated.blocks[0].tolist())),
        content=content(prompt(1)),
    )
    made = requests.make_call(call, "test", "", "FinishedBlocks", request)
    event: FinishedBlocks = requests.finished_blocks(request, made, "", 8)
    await lead.runner.ask(call, event)


class Ended(Exception):
    """The status that a method ended with."""

    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__(code)
        self.code = code


class _Context:
    """The part of a gRPC context that methods use, without metadata."""

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def set_trailing_metadata(self, metadata: Any) -> None:
        pass

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        raise Ended(code)


async def test_a_change_while_the_first_message_is_on_its_way_is_not_missed(server: Server) -> None:
    watch: Any = TransferService(server._lead).WatchTransfers(transfer_pb2.WatchTransfersRequest(), _Context())
    first = await anext(watch)
    await hand_over(server)
    change = await anext(watch)
    assert change.transfer.event_seq == first.header.event_seq + 1
    await watch.aclose()


async def test_a_watch_ends_with_the_last_change_of_its_life(server: Server) -> None:
    await hand_over(server)
    watch: Any = TransferService(server._lead).WatchTransfers(transfer_pb2.WatchTransfersRequest(), _Context())
    first = await anext(watch)
    await server._begin_idle()
    await hand_over(server)
    last = await anext(watch)
    assert last.header.incarnation == first.header.incarnation != server._lead.runner.node.state.life.incarnation
    assert (last.transfer.state, last.header.event_seq) == (FAILED, first.header.event_seq + 1)
    with pytest.raises(Ended) as ended:
        await anext(watch)
    assert ended.value.code is grpc.StatusCode.ABORTED


async def test_waiting_for_a_transfer_ends_with_its_life(server: Server) -> None:
    await hand_over(server)
    (transfer,) = server._runner.node.state.transfers
    waiting = asyncio.ensure_future(server._lead.watchers.wait(transfer.id, lambda _: False, 60.0))
    await asyncio.sleep(0)
    await server._begin_idle()
    with pytest.raises(NotFound):
        await asyncio.wait_for(waiting, 10)


async def test_a_watcher_that_resumes_after_any_message_misses_nothing_that_matches(server: Server) -> None:
    await hand_over(server)
    (transfer,) = server._runner.node.state.transfers

    @given(st.lists(st.booleans(), max_size=40), st.integers(0, 40), st.integers(1, 5), st.lists(st.integers(0, 3)))
    def check(matching: list[bool], past: int, progress: int, reads: list[int]) -> None:
        changes = [replace(transfer, seq=seq, priority=int(match)) for seq, match in enumerate(matching, 1)]
        watch = TransferWatcher(lambda change: change.priority > 0, changes[:past], progress)
        wanted = [change.seq for change in changes if change.priority]
        told: list[int] = []
        seen = min(past, len(changes))

        def read(most: int) -> None:
            nonlocal seen
            for _ in range(min(most, len(watch._queue))):
                seen, change = watch._queue.popleft()
                told.extend([change.seq] if change else [])
                assert told == [seq for seq in wanted if seq <= seen]

        for change in changes[past:]:
            watch.add(change)
            read(reads.pop() if reads else 0)
        read(len(changes))
        assert told == wanted
        assert len(changes) - seen < progress

    check()


async def test_a_watcher_that_is_too_slow_is_told_so_after_what_was_kept_for_it(server: Server) -> None:
    await hand_over(server)
    runner = server._runner
    (transfer,) = runner.node.state.transfers
    with server._lead.watchers.watch(lambda _: True, []) as watch:
        for seq in range(WATCH_BACKLOG_MAX + 5):
            for listener in runner.on_transfer:
                listener(replace(transfer, seq=seq))
        for seq in range(WATCH_BACKLOG_MAX):
            assert (await watch.next()).seq == seq
        with pytest.raises(Exhausted):
            await watch.next()


async def test_who_waits_learns_the_end_that_comes_with_the_end_of_the_life(server: Server) -> None:
    await hand_over(server)
    (transfer,) = server._runner.node.state.transfers
    waiting = asyncio.ensure_future(server._lead.watchers.wait(transfer.id, lambda t: t.over, 60.0))
    await asyncio.sleep(0)
    await server._begin_idle()
    end = await asyncio.wait_for(waiting, 10)
    assert end.failure is not None
    assert end.failure.reason is Reason.ENGINE_LOST
