"""The synchronous client has the methods of the asynchronous one, with the same behaviour."""

import asyncio
import contextlib
import inspect
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any, TypeVar

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from kvgrpc.client import (
    Client,
    Fleet,
    HeldLease,
    Pace,
    Scheduler,
    SyncClient,
    SyncFleet,
    SyncHeldLease,
    SyncScheduler,
    SyncTensors,
    Tensors,
    connect,
    connect_sync,
)
from kvgrpc.client.values import duration
from kvgrpc.errors import Exhausted, PreconditionFailed, Reason
from kvgrpc.v1.common_pb2 import FAILURE_REASON_LEASE_EXPIRED, Grant, ResponseHeader
from kvgrpc.v1.lease_pb2 import GrantLeaseResponse, KeepAliveResponse, Lease, RenewedLease
from kvgrpc.v1.transfer_pb2 import Transfer, WatchTransfersResponse
from tests.client.fake import FakeServer, failing

T = TypeVar("T")


def public(kind: type) -> dict[str, Any]:
    members = inspect.getmembers(kind, lambda member: inspect.isfunction(member) or isinstance(member, property))
    return {name: member for name, member in members if not name.startswith("_")}


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


@pytest.mark.parametrize(
    ("twin", "original"),
    [
        (SyncClient, Client),
        (SyncFleet, Fleet),
        (SyncHeldLease, HeldLease),
        (SyncScheduler, Scheduler),
        (SyncTensors, Tensors),
    ],
)
def test_the_twin_has_the_same_methods_with_the_same_parameters_and_words(twin: type, original: type) -> None:
    methods, originals = public(twin), public(original)
    # Plain attributes of the original are properties of its twin.
    attributes = {HeldLease: {"lease_id", "grant"}, Scheduler: {"incarnation"}}.get(original, set())
    assert set(methods) - attributes == set(originals)
    for name in set(originals):
        assert methods[name].__doc__ == originals[name].__doc__ or name in {"check", "reason"}
        if inspect.isfunction(originals[name]):
            assert parameters(methods[name]) == parameters(originals[name])


def test_connect_is_the_same_too() -> None:
    assert parameters(connect_sync) == parameters(connect)


async def in_thread(work: Callable[[str], T], server: FakeServer) -> T:
    """Runs work like a program without an event loop, in a thread. The fake server keeps this thread's loop."""
    async with asyncio.timeout(30):
        return await asyncio.to_thread(work, server.address)


async def test_calls_block_until_the_reply_and_raise_the_same_errors(server: FakeServer) -> None:
    server.answers["AllocateBlocks"] = failing(grpc.StatusCode.RESOURCE_EXHAUSTED, "POOL_EXHAUSTED")

    def work(address: str) -> None:
        with connect_sync(address, timeout_s=5.0, metadata={"k": "v"}) as client:
            client.finished_blocks([1], [2], request_id="r")
            with pytest.raises(Exhausted) as raised:
                client.allocate(1)
            assert raised.value.reason is Reason.POOL_EXHAUSTED

    await in_thread(work, server)
    assert [seen.method for seen in server.seen] == ["FinishedBlocks", "AllocateBlocks"]
    assert server.seen[0].metadata["k"] == "v"
    assert server.seen[0].time_s is not None
    assert server.seen[0].time_s < 6


async def test_a_watch_is_an_iterator_and_leaving_it_ends_its_stream(server: FakeServer) -> None:
    ended = asyncio.Event()

    async def watch(request: Any, context: Any) -> AsyncIterator[WatchTransfersResponse]:
        try:
            yield WatchTransfersResponse(header=ResponseHeader(incarnation=7, event_seq=1))
            for seq in (2, 3):
                header = ResponseHeader(incarnation=7, event_seq=seq)
                yield WatchTransfersResponse(header=header, transfer=Transfer(event_seq=seq))
            await asyncio.Event().wait()
        finally:
            ended.set()

    server.answers["WatchTransfers"] = watch

    def work(address: str) -> list[int]:
        with connect_sync(address) as client:
            events: Iterator[Any] = client.watch()
            return [next(events).header.event_seq, next(events).header.event_seq]

    assert await in_thread(work, server) == [2, 3]
    await asyncio.wait_for(ended.wait(), 20)


async def test_a_watch_that_ends_in_the_loops_own_thread_does_not_stop_it(server: FakeServer) -> None:
    ended = asyncio.Event()

    async def watch(request: Any, context: Any) -> AsyncIterator[WatchTransfersResponse]:
        try:
            yield WatchTransfersResponse(header=ResponseHeader(incarnation=7, event_seq=1))
            yield WatchTransfersResponse(header=ResponseHeader(incarnation=7, event_seq=2), transfer=Transfer())
            await asyncio.Event().wait()
        finally:
            ended.set()

    server.answers["WatchTransfers"] = watch

    def work(address: str) -> None:
        client = connect_sync(address)
        last = [client.watch()]
        next(last[0])
        # Drops the watch in the loop's thread, as its garbage collector can.
        client._thread._loop.result().call_soon_threadsafe(last.clear)
        client.status()
        client.close()

    await in_thread(work, server)
    await asyncio.wait_for(ended.wait(), 20)


FORKS = """
import os, sys
from kvgrpc.client import connect_sync

with connect_sync(sys.argv[1]) as client:
    client.status()
    child = os.fork()
    if not child:
        for use in (client.status, lambda: connect_sync(sys.argv[1])):
            try:
                use()
            except RuntimeError as error:
                print("forked" in str(error), flush=True)
        client.close()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    client.status()
"""


async def test_a_child_that_was_forked_is_told_that_it_cannot_go_on(server: FakeServer) -> None:
    def work(address: str) -> str:
        command = [sys.executable, "-W", "ignore", "-c", FORKS, address]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=30).stdout

    assert (await in_thread(work, server)).split() == ["True", "True", "0"]
    assert len(server.requests("GetStatus")) == 2


async def test_a_watch_that_fails_raises(server: FakeServer) -> None:
    def work(address: str) -> None:
        with connect_sync("127.0.0.1:1") as client, pytest.raises(Exception, match=r"127\.0\.0\.1:1"):
            next(client.watch(pace=Pace(give_up_s=0.01, pause_first_s=0.02)))

    await in_thread(work, server)


async def test_a_lease_is_kept_alive_and_its_loss_is_told(server: FakeServer) -> None:
    expired = threading.Event()

    def grant(request: Any, context: Any) -> GrantLeaseResponse:
        return GrantLeaseResponse(lease=Lease(lease_id="l", remaining=duration(1.2)), grant=Grant(token=b"t"))

    async def keep_alive(requests: Any, context: Any) -> AsyncIterator[KeepAliveResponse]:
        async for _ in requests:
            over = expired.is_set()
            row = RenewedLease(reason=FAILURE_REASON_LEASE_EXPIRED) if over else RenewedLease(remaining=duration(1.2))
            yield KeepAliveResponse(leases=[row])

    server.answers.update(GrantLease=grant, KeepAlive=keep_alive)

    def work(address: str) -> None:
        with connect_sync(address) as client:
            with client.lease([1], [2]) as held:
                assert (held.lease_id, held.grant, held.reason) == ("l", Grant(token=b"t"), None)
                held.check()
            with client.lease([1], [2]) as held:
                expired.set()
                assert held.wait_over() is Reason.LEASE_EXPIRED
                with pytest.raises(PreconditionFailed):
                    held.check()
            with pytest.raises(KeyError), client.lease([1], [2]):
                raise KeyError("mine")

    await in_thread(work, server)
    assert len(server.requests("ReleaseLease")) == 2


async def test_the_callers_span_goes_along(server: FakeServer) -> None:
    context = SpanContext(1 << 120, 1 << 60, is_remote=False, trace_flags=TraceFlags(1))

    def work(address: str) -> None:
        with connect_sync(address) as client:
            client.status()
            with trace.use_span(NonRecordingSpan(context)):
                client.status()

    await in_thread(work, server)
    assert [seen.metadata.get("traceparent", "")[:7] for seen in server.seen] == ["", "00-0100"]


async def test_all_clients_share_one_thread_that_ends_with_the_last(server: FakeServer) -> None:
    def threads() -> int:
        return sum(thread.name == "kvgrpc client" for thread in threading.enumerate())

    def work(address: str) -> None:
        with connect_sync(address) as one:
            with connect_sync(address) as other:
                assert threads() == 1
                one.status()
                other.status()
            assert threads() == 1
            one.status()
        assert threads() == 0

    await in_thread(work, server)


async def test_one_client_serves_many_threads(server: FakeServer) -> None:
    def work(address: str) -> None:
        with connect_sync(address) as client:
            workers = [threading.Thread(target=client.status) for _ in range(8)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()

    await in_thread(work, server)
    assert len(server.seen) == 8


async def test_closing_a_client_ends_what_other_threads_wait_for(server: FakeServer) -> None:
    reading = threading.Event()

    async def silent(request: Any, context: Any) -> AsyncIterator[WatchTransfersResponse]:
        reading.set()
        await asyncio.Event().wait()
        yield WatchTransfersResponse()

    server.answers["WatchTransfers"] = silent

    def read(client: SyncClient) -> None:
        with contextlib.suppress(CancelledError):
            next(client.watch())

    def work(address: str) -> None:
        client = connect_sync(address)
        reader = threading.Thread(target=read, args=(client,))
        reader.start()
        assert reading.wait(20)
        client.close()
        reader.join(20)
        assert not reader.is_alive()

    await in_thread(work, server)


async def test_a_closed_client_says_so(server: FakeServer) -> None:
    def work(address: str) -> None:
        client = connect_sync(address)
        client.close()
        client.close()
        with pytest.raises(RuntimeError, match="closed"):
            client.status()

    await in_thread(work, server)


def test_arguments_are_checked_before_a_thread_is_started() -> None:
    with pytest.raises(ValueError, match="deadline"):
        connect_sync("127.0.0.1:1", timeout_s=0)
    assert not [thread for thread in threading.enumerate() if thread.name == "kvgrpc client"]
