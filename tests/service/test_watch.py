"""WatchTransfers: every change, once, in order, from now or from where a watcher left off."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from kvgrpc.config import Config, PoolConfig
from kvgrpc.core.events import FinishedBlocks
from kvgrpc.errors import Exhausted
from kvgrpc.server import Server
from kvgrpc.service.transfer_service import TransferService
from kvgrpc.service.watchers import WATCH_BACKLOG_MAX, WATCHES_MAX
from kvgrpc.v1 import handoff_pb2, pool_pb2, transfer_pb2
from kvgrpc.wire import requests
from tests.service.api import read_refusal
from tests.service.conftest import SETTINGS, Start
from tests.service.engines import CANCELLED, Engine, wait_until
from tests.service.values import content, group, new_key, prompt

WATCH = "/kvgrpc.v1.TransferService/WatchTransfers"
Watch = Iterator[transfer_pb2.WatchTransfersResponse]


@contextmanager
def watching(engine: Engine, **fields: Any) -> Iterator[Watch]:
    stream = engine.api.transfers.WatchTransfers(transfer_pb2.WatchTransfersRequest(**fields), timeout=30)
    try:
        yield stream
    finally:
        stream.cancel()


def until(watch: Watch, seq: int) -> list[transfer_pb2.WatchTransfersResponse]:
    """The messages up to the change with that number."""
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


def test_the_first_message_only_tells_that_the_watch_stands(source: Engine) -> None:
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
    assert [c.transfer.transfer_id for c in changes if c.transfer.waiting_for == "readers"] == ids


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


@pytest.mark.parametrize("incarnation", [0, 1])
def test_a_number_of_another_life_is_refused(source: Engine, incarnation: int) -> None:
    assert refused_watch(source, after_event_seq=1, incarnation=incarnation) == ("ABORTED", "INCARNATION_CHANGED")


def test_watches_are_bounded_and_one_that_ends_makes_room(source: Engine) -> None:
    request = transfer_pb2.WatchTransfersRequest()
    streams = [source.api.transfers.WatchTransfers(request, timeout=60) for _ in range(WATCHES_MAX)]
    try:
        for stream in streams:
            next(stream)
        assert refused_watch(source) == ("RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED")
        streams.pop().cancel()
        wait_until(lambda: _stands(source))
    finally:
        for stream in streams:
            stream.cancel()
    wait_until(lambda: _stands(source))


def _stands(engine: Engine) -> bool:
    with watching(engine) as watch:
        try:
            next(watch)
        except grpc.RpcError:
            return False
    return True


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """In this process, for rules about what happens between two steps of the server."""
    config = Config(listen="127.0.0.1:0", data_paths=("shm",), pool=PoolConfig(blocks=8, layers=1))
    server = Server(config)
    await server.start()
    yield server
    await server.stop()


async def hand_over(server: Server) -> None:
    """A change, now."""
    lead = server._lead
    call = lead.runner.next_call_id()
    allocation = pool_pb2.AllocateBlocksRequest(counts=[pool_pb2.GroupCount(count=1)])
    made = requests.make_call(call, "test", "", "AllocateBlocks", allocation)
    allocated: Any = await lead.runner.ask(call, requests.allocate_blocks(allocation, made))
    call = lead.runner.next_call_id()
    request = handoff_pb2.FinishedBlocksRequest(
        transfer_key=new_key(),
        blocks=[group(allocated.blocks[0].tolist())],
        content=content(prompt(1)),
        last=True,
    )
    made = requests.make_call(call, "test", "", "FinishedBlocks", request)
    event: FinishedBlocks = requests.finished_blocks(request, made, "", 8)
    await lead.runner.ask(call, event)


class _Context:
    """What gRPC gives to a method: here without metadata."""

    def invocation_metadata(self) -> tuple[()]:
        return ()


async def test_a_change_while_the_first_message_is_on_its_way_is_not_missed(server: Server) -> None:
    watch: Any = TransferService(server._lead).WatchTransfers(transfer_pb2.WatchTransfersRequest(), _Context())
    first = await anext(watch)
    await hand_over(server)
    change = await anext(watch)
    assert change.transfer.event_seq == first.header.event_seq + 1
    await watch.aclose()


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
