"""A busy server takes all calls over from gRPC, and lets them begin in a fair order."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from kvgrpc.config import Config, PoolConfig
from kvgrpc.errors import Exhausted
from kvgrpc.server import Server
from kvgrpc.service import call_queue
from kvgrpc.service.backlog import Backlog, with_backlog
from kvgrpc.service.call_queue import AT_ONCE, BYTES_MAX, CallQueue
from kvgrpc.v1 import admin_pb2
from kvgrpc.v1.admin_pb2_grpc import AdminServiceStub

CALLS = 96
"""Number of calls of a flood: fewer than a connection may have open."""


class _Counting(grpc.GenericRpcHandler):
    """Answers every call, and counts those that are handed over."""

    def __init__(self) -> None:
        self.backlog: Backlog | None = None

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        assert self.backlog is not None
        self.backlog.handed_over += 1
        return grpc.unary_unary_rpc_method_handler(_answer)


async def _answer(request: bytes, _: Any) -> bytes:
    return request


@asynccontextmanager
async def channel_to(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """Yields a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        await channel.channel_ready()
        yield channel


def hold_until(met: Callable[[], bool]) -> None:
    """Holds the event loop up until something is so that happens in threads."""
    until = time.monotonic() + 30
    while not met():
        assert time.monotonic() < until
        time.sleep(0.001)


async def test_a_backlog_is_what_grpc_has_and_has_not_handed_over() -> None:
    handlers = _Counting()
    server, backlog = with_backlog(lambda: grpc.aio.server(handlers=[handlers]))
    handlers.backlog = backlog
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with channel_to(f"127.0.0.1:{port}") as channel:
            assert backlog.count() == 0
            method: Any = channel.unary_unary("/a/b")
            calls = [method(b"") for _ in range(CALLS)]
            await asyncio.sleep(0)
            hold_until(lambda: backlog.count() + backlog.handed_over == CALLS)
            assert backlog.count() > CALLS // 2
            await asyncio.gather(*calls)
            assert (backlog.count(), backlog.handed_over) == (0, CALLS)
            backlog.handed_over -= 3
            assert backlog.count() == 3
            assert backlog.forget() == 3
            assert backlog.count() == 0
            backlog.handed_over += 2
            assert (backlog.count(), backlog.handed_over) == (0, CALLS)
    finally:
        await server.stop(None)
    assert backlog.count() == 0


async def test_a_server_that_channelz_does_not_know_has_no_backlog() -> None:
    server, backlog = with_backlog(lambda: grpc.aio.server(options=[("grpc.enable_channelz", 0)]))
    await server.stop(None)
    assert backlog.count() == 0


async def test_a_backlog_is_that_of_its_own_server_when_others_are_made_meanwhile() -> None:
    handlers = _Counting()
    others: list[grpc.aio.Server] = []

    def make() -> grpc.aio.Server:
        server = grpc.aio.server(handlers=[handlers])
        if len(others) < 2:
            others.append(grpc.aio.server())
        return server

    server, handlers.backlog = with_backlog(make)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with channel_to(f"127.0.0.1:{port}") as channel:
            method: Any = channel.unary_unary("/a/b")
            assert await method(b"x") == b"x"
    finally:
        await server.stop(None)
    assert len(others) == 2


async def test_servers_that_threads_make_at_once_have_backlogs_of_their_own() -> None:
    threads = 4
    together = threading.Barrier(threads)

    def make() -> list[tuple[grpc.Server, Backlog]]:
        together.wait(30)
        return [with_backlog(lambda: grpc.server(ThreadPoolExecutor(1))) for _ in range(8)]

    with ThreadPoolExecutor(threads) as pool:
        made = [pool.submit(make) for _ in range(threads)]
    numbers = [backlog.server_id for one in made for _, backlog in one.result()]
    assert len(set(numbers)) == threads * 8


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """Yields a server on the loop of the test."""
    made = Server(Config(listen="127.0.0.1:0", data_paths=("shm",), pool=PoolConfig(blocks=8, layers=1)))
    await made.start()
    yield made
    await made.stop()


async def test_a_call_goes_before_a_flood_that_came_before_it(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in ("STALLED_S", "LISTEN_S", "WAIT_S"):
        monkeypatch.setattr(call_queue, bound, 1e6)  # only the order counts here, however slow the machine is
    ended: list[str] = []
    (backlog,) = server._lead.call_queue.backlogs
    before = backlog.handed_over

    def call(stub: Any, name: str) -> Any:
        made = stub.GetStatus(admin_pb2.GetStatusRequest())
        made.add_done_callback(lambda _: ended.append(name))
        return made

    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(channel_to(server.address)) for _ in range(3)]
        stubs = [AdminServiceStub(channel) for channel in channels]
        floods = [call(stub, "flood") for _ in range(CALLS) for stub in stubs[:2]]
        await asyncio.sleep(0)
        hold_until(lambda: backlog.count() + backlog.handed_over == before + 2 * CALLS)
        assert server._lead.call_queue.backlog() == backlog.count()
        other = call(stubs[2], "other")
        await asyncio.sleep(0)
        hold_until(lambda: backlog.count() + backlog.handed_over == before + 2 * CALLS + 1)
        await asyncio.gather(other, *floods)
    assert len(ended) == 2 * CALLS + 1
    assert ended.index("other") < CALLS


async def test_a_caller_keeps_no_more_bytes_in_the_queue_than_it_leaves() -> None:
    queue = CallQueue()
    queue.crowd()
    large = BYTES_MAX // 4
    entered = [asyncio.create_task(queue.enter("a", large)) for _ in range(8)]
    await asyncio.sleep(0)
    waiting = queue.waiting
    await asyncio.wait(entered)
    refusals = [task.exception() for task in entered if task.exception() is not None]
    assert refusals
    assert all(isinstance(one, Exhausted) and one.retry_delay_s for one in refusals)
    assert queue.refused == len(refusals) == len(entered) - AT_ONCE - waiting
    assert queue.waiting == 0
    assert not queue.busy
    await asyncio.wait_for(queue.enter("a", large), 30)
