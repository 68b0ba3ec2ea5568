"""Rules for every call: a deadline, retries of UNAVAILABLE only, one key over retries, trace context for spans only."""

import asyncio
import inspect
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

from kvgrpc.client import Client, Fleet, Scheduler, connect
from kvgrpc.client.caller import NOT_BEGUN_REPEATS
from kvgrpc.client.tensors import MARGIN_S, Tensors
from kvgrpc.errors import (
    DeadlineExceeded,
    Exhausted,
    InternalError,
    KVGrpcError,
    PreconditionFailed,
    Reason,
    Unavailable,
)
from kvgrpc.v1.admin_pb2 import ListPinsResponse
from kvgrpc.v1.common_pb2 import Grant
from kvgrpc.v1.handshake_pb2 import EngineDescription
from kvgrpc.v1.lease_pb2 import RenewedLease, RenewLeasesResponse
from kvgrpc.v1.pool_pb2 import FreeBlocksResponse
from kvgrpc.v1.tensor_pb2 import TensorDescription
from kvgrpc.v1.transfer_pb2 import (
    TRANSFER_STATE_SUCCEEDED,
    ListTransfersResponse,
    Transfer,
    WaitTransferResponse,
    WaitTransfersResponse,
)
from tests.client.fake import METHODS, FakeServer, fail, failing

GRANT = Grant(token=b"t", lease_id="l")
Invoke = Callable[..., Awaitable[Any]]

# Method of the client -> function that calls it and passes options on.
READS: dict[str, Callable[[Client], Invoke]] = {
    "capabilities": lambda c: c.capabilities,
    "get_engine": lambda c: c.get_engine,
    "check_compatibility": lambda c: lambda **o: c.check_compatibility(EngineDescription(), **o),
    "connect_peer": lambda c: lambda **o: c.connect_peer("127.0.0.1:1", **o),
    "handshake": lambda c: lambda **o: c.handshake(EngineDescription(), **o),
    "describe_pools": lambda c: c.describe_pools,
    "pool_status": lambda c: c.pool_status,
    "allocations": lambda c: c.allocations,
    "read_blocks": lambda c: lambda **o: c.read_blocks([1], **o),
    "get_transfer": lambda c: lambda **o: c.get_transfer("t", **o),
    "list_transfers": lambda c: c.list_transfers,
    "get_lease": lambda c: lambda **o: c.get_lease("l", **o),
    "list_leases": lambda c: c.list_leases,
    "renew_leases": lambda c: lambda **o: c.renew_leases(["l"], **o),
    "status": lambda c: c.status,
    "get_drain": lambda c: c.get_drain,
    "peers": lambda c: c.peers,
    "pins": lambda c: c.pins,
    "audit_records": lambda c: c.audit_records,
    "spans": lambda c: lambda **o: c.spans(trace_id="ab" * 16, **o),
    "find_offers": lambda c: lambda **o: c.find_offers([2], **o),
    "forget_engine": lambda c: lambda **o: c.forget_engine("d", **o),
}
SCHEDULER: dict[str, Callable[[Scheduler], Invoke]] = {
    "request_arrived": lambda s: lambda **o: s.request_arrived("r", [2], **o),
    "match_tokens": lambda s: lambda **o: s.match_tokens("r", **o),
    "blocks_allocated": lambda s: lambda **o: s.blocks_allocated("r", [1], **o),
    "tokens_computed": lambda s: lambda **o: s.tokens_computed("r", [1], 16, **o),
    "blocks_loaded": lambda s: lambda **o: s.blocks_loaded("r", **o),
    "request_preempted": lambda s: lambda **o: s.request_preempted("r", **o),
    "request_finished": lambda s: lambda **o: s.request_finished("r", [1], 16, **o),
    "blocks_needed": lambda s: lambda **o: s.blocks_needed(1, **o),
    "abort_request": lambda s: lambda **o: s.abort_request("r", **o),
    "poll": lambda s: s.poll,
}


def of_scheduler(name: str) -> Callable[[Client], Invoke]:
    return lambda client: SCHEDULER[name](client.scheduler())


READS.update((f"scheduler().{name}", of_scheduler(name)) for name in SCHEDULER)
KEY = b"k" * 16
TENSORS: dict[str, Callable[[Tensors], Invoke]] = {
    "put": lambda t: lambda **o: t.put(KEY, "k", TensorDescription(), allocation_id="a", **o),
    "get": lambda t: lambda **o: t.get(KEY, "k", **o),
    "release": lambda t: lambda **o: t.release(KEY, **o),
    "list": lambda t: t.list,
    "status": lambda t: t.status,
}


def of_tensors(name: str) -> Callable[[Client], Invoke]:
    return lambda client: TENSORS[name](client.tensors())


FLEET: dict[str, Callable[[Fleet], Invoke]] = {"engines": lambda f: f.engines, "pick_pair": lambda f: f.pick_pair}


def of_fleet(name: str) -> Callable[[Client], Invoke]:
    return lambda client: FLEET[name](client.fleet())


READS.update((f"fleet().{name}", of_fleet(name)) for name in FLEET)
READS.update((f"tensors().{name}", of_tensors(name)) for name in TENSORS)
CHANGES: dict[str, Callable[[Client], Invoke]] = {
    "allocate": lambda c: lambda **o: c.allocate(1, **o),
    "reclaim": lambda c: lambda **o: c.reclaim(1, **o),
    "renew_allocation": lambda c: lambda **o: c.renew_allocation("a", **o),
    "free": lambda c: lambda **o: c.free([1], **o),
    "release_quarantine": lambda c: c.release_quarantine,
    "start_drain": lambda c: c.start_drain,
    "cancel_drain": lambda c: c.cancel_drain,
    "finished_blocks": lambda c: lambda **o: c.finished_blocks([1], [2], **o),
    "push_part": lambda c: lambda **o: c.push_part(KEY, [1], [2], **o),
    "source_failed": lambda c: lambda **o: c.source_failed(KEY, **o),
    "pull_blocks": lambda c: lambda **o: c.pull_blocks(GRANT, [2], **o),
    "reserve_blocks": lambda c: lambda **o: c.reserve_blocks(KEY, [1], [2], **o),
    "register_push": lambda c: lambda **o: c.register_push(GRANT, **o),
    "acknowledge": lambda c: lambda **o: c.acknowledge(["t"], **o),
    "cancel": lambda c: lambda **o: c.cancel("t", **o),
    "grant_lease": lambda c: lambda **o: c.grant_lease([1], [2], **o),
    "release_lease": lambda c: lambda **o: c.release_lease("l", **o),
}
# Methods that make other kinds of calls; each has tests of its own.
LONGER = {"pull", "receive", "wait", "wait_transfers", "watch", "watch_engine", "watch_offers", "lease", "keep_alive"}
ALL = {**READS, **CHANGES}


def test_the_table_above_names_every_method() -> None:
    def public(kind: type) -> set[str]:
        return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}

    assert (
        public(Client) - {"close", "fleet", "scheduler", "tensors"}
        == {name for name in ALL if "." not in name} | LONGER
    )
    assert public(Scheduler) - {"start_over", "step"} == SCHEDULER.keys()
    assert public(Tensors) == TENSORS.keys()
    assert public(Fleet) - {"watch"} == FLEET.keys()


async def test_every_rpc_of_the_schema_has_a_method(server: FakeServer, client: Client) -> None:
    server.answers["WaitTransfer"] = lambda request, context: WaitTransferResponse(
        transfer=Transfer(state=TRANSFER_STATE_SUCCEEDED), condition_met=True
    )
    server.answers["WaitTransfers"] = lambda request, context: WaitTransfersResponse(condition_met=True)
    for method in ALL.values():
        await method(client)()
    await client.wait("t")
    await client.wait_transfers(["t"])
    streams = {"WatchTransfers", "WatchEngine", "WatchEngines", "WatchOffers", "KeepAlive", "Schedule"}
    assert {seen.method for seen in server.seen} | streams == set(METHODS)


async def test_every_call_has_a_deadline(server: FakeServer, client: Client, subtests: pytest.Subtests) -> None:
    # gRPC rounds the timeout that it sends up, by at most 1 %.
    longer_s = {"release_quarantine": 60.1, "tensors().put": 60.7 + MARGIN_S, "tensors().get": 30.4 + MARGIN_S}
    for name, method in ALL.items():
        with subtests.test(name):
            await method(client)()
            await method(client)(timeout_s=3.0)
            usual, chosen = (seen.time_s for seen in server.seen[-2:])
            assert usual is not None
            assert 3.1 < usual <= longer_s.get(name, 10.1)
            assert chosen is not None
            assert chosen <= 3.1


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("inf"), float("nan"), None])
async def test_a_call_without_a_deadline_is_refused(client: Client, timeout_s: Any) -> None:
    with pytest.raises(ValueError, match="every call has a deadline"):
        await client.capabilities(timeout_s=timeout_s)
    with pytest.raises(ValueError, match="every call has a deadline"):
        connect("127.0.0.1:1", timeout_s=timeout_s)


async def test_an_option_that_a_call_does_not_have_is_refused(client: Client, subtests: pytest.Subtests) -> None:
    for name, method in ALL.items():
        with subtests.test(name), pytest.raises((TypeError, ValueError), match="timeout_ms"):
            await method(client)(timeout_ms=3)


@pytest.mark.parametrize("name", CHANGES)
async def test_what_changes_something_has_a_fresh_key(server: FakeServer, client: Client, name: str) -> None:
    for _ in range(2):
        await CHANGES[name](client)()
    await CHANGES[name](client)(idempotency_key="mine")
    await CHANGES[name](client)(idempotency_key="")
    first, second, mine, empty = (seen.request.idempotency_key for seen in server.seen)
    assert len({first, second, ""}) == 3
    assert (mine, empty) == ("mine", "")


async def test_a_retry_has_the_key_of_the_first_attempt(server: FakeServer, client: Client) -> None:
    async def second_time(request: Any, context: Any) -> Any:
        if len(server.seen) < 2:
            await fail(context, grpc.StatusCode.UNAVAILABLE, "DRAINING")
        return FreeBlocksResponse()

    server.answers["FreeBlocks"] = second_time
    await client.free([1, 2, 3])
    first, second = server.requests("FreeBlocks")
    assert first == second
    assert first.idempotency_key


async def test_attempts_are_limited_and_the_error_names_the_key(server: FakeServer, client: Client) -> None:
    server.answers["FreeBlocks"] = failing(grpc.StatusCode.UNAVAILABLE, "DRAINING")
    with pytest.raises(Unavailable) as raised:
        await client.free([1])
    assert raised.value.reason is Reason.DRAINING
    requests = server.requests("FreeBlocks")
    assert len(requests) == 4
    assert {request.idempotency_key for request in requests} == {raised.value.metadata["idempotency_key"]}


async def test_a_call_that_an_ending_server_has_not_begun_is_repeated_with_its_key(
    server: FakeServer, client: Client
) -> None:
    async def second_time(request: Any, context: Any) -> Any:
        if len(server.seen) < 2:
            await fail(context, grpc.StatusCode.CANCELLED)
        return FreeBlocksResponse()

    server.answers["FreeBlocks"] = second_time
    await client.free([1])
    first, second = server.requests("FreeBlocks")
    assert first == second
    server.answers["GetStatus"] = failing(grpc.StatusCode.CANCELLED)
    with pytest.raises(Unavailable):
        await client.status()
    assert len(server.requests("GetStatus")) == 1 + NOT_BEGUN_REPEATS


async def test_a_call_that_a_server_cancels_for_a_reason_is_not_repeated(server: FakeServer, client: Client) -> None:
    server.answers["GetStatus"] = failing(grpc.StatusCode.CANCELLED, "CANCELLED")
    with pytest.raises(KVGrpcError):
        await client.status()
    assert len(server.seen) == 1


REPEATED = {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
NOT_RETRIED = sorted(set(grpc.StatusCode) - REPEATED, key=lambda c: c.name)


@pytest.mark.parametrize("code", NOT_RETRIED, ids=lambda code: code.name)
async def test_no_other_status_is_retried(server: FakeServer, client: Client, code: grpc.StatusCode) -> None:
    server.answers["GetStatus"] = failing(code)
    with pytest.raises(KVGrpcError):
        await client.status()
    assert len(server.seen) == 1


async def test_a_server_that_is_away_is_an_error_not_a_wait() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: no other process gets this port
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        async with connect(address, timeout_s=30) as client:
            started = time.monotonic()
            with pytest.raises(Unavailable) as raised:
                await client.capabilities()
    assert time.monotonic() - started < 15
    assert raised.value.reason is Reason.PEER_UNREACHABLE
    assert address in str(raised.value)


async def test_a_server_that_comes_back_is_found_again(server: FakeServer, client: Client) -> None:
    await client.capabilities()
    await server.stop()
    with pytest.raises(Unavailable):
        await client.capabilities()
    await server.start()
    async with asyncio.timeout(20):
        while True:
            try:
                await client.capabilities()
                break
            except Unavailable:
                continue


async def test_a_deadline_of_the_client_names_call_and_phase(server: FakeServer, client: Client) -> None:
    async def never(request: Any, context: Any) -> Any:
        await asyncio.Event().wait()

    server.answers["FreeBlocks"] = never
    with pytest.raises(DeadlineExceeded) as raised:
        await client.free([1], timeout_s=0.05)
    error = raised.value
    assert error.reason is Reason.DEADLINE
    assert error.metadata["phase"] == "call"
    assert error.metadata["method"] == "FreeBlocks"
    assert error.metadata["address"] == server.address
    assert error.metadata["idempotency_key"] == server.requests("FreeBlocks")[0].idempotency_key


async def test_a_deadline_of_the_server_keeps_its_phase(server: FakeServer, client: Client) -> None:
    server.answers["ConnectPeer"] = failing(
        grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE", metadata={"phase": "handshake"}
    )
    with pytest.raises(DeadlineExceeded) as raised:
        await client.connect_peer("127.0.0.1:1")
    assert raised.value.metadata["phase"] == "handshake"


async def test_cancelling_a_task_ends_its_call(server: FakeServer, client: Client) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def long(request: Any, context: Any) -> Any:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    server.answers["GetStatus"] = long
    task = asyncio.ensure_future(client.status())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(10):
        await ended.wait()
    assert len(server.seen) == 1, "a call that its caller cancels is not repeated"


async def test_trace_context_is_sent_only_with_a_span(server: FakeServer, client: Client) -> None:
    await client.status()
    context = SpanContext(
        0xA << 120 | 1, 0xB << 56 | 2, is_remote=False, trace_flags=TraceFlags(1), trace_state=TraceState([("k", "v")])
    )
    with trace.use_span(NonRecordingSpan(context)):
        await client.status()
    without, with_span = (seen.metadata for seen in server.seen)
    assert "traceparent" not in without
    assert "tracestate" not in without
    assert with_span["traceparent"] == "00-0a000000000000000000000000000001-0b00000000000002-01"
    assert with_span["tracestate"] == "k=v"


async def test_metadata_of_the_client_goes_with_every_call(server: FakeServer) -> None:
    server.answers["RenewLeases"] = lambda request, context: RenewLeasesResponse(leases=[RenewedLease()])
    async with connect(server.address, metadata={"Authorization": "Bearer x"}) as client:
        await client.status()
        await client.renew_leases(["l"])
    assert [seen.metadata["authorization"] for seen in server.seen] == ["Bearer x"] * 2


async def test_all_pages_are_one_reply_with_the_header_of_the_first(server: FakeServer, client: Client) -> None:
    def page(request: Any, context: Any) -> Any:
        number = int(request.page_token or 0)
        rows = [Transfer(transfer_id=f"{number}-{row}") for row in range(min(request.page_size, 3))]
        made = ListTransfersResponse(transfers=rows, next_page_token="" if number == 2 else str(number + 1))
        made.header.event_seq = 10 + number
        return made

    server.answers["ListTransfers"] = page
    whole = await client.list_transfers(request_id="r")
    assert len(whole.transfers) == 9
    assert whole.header.event_seq == 10
    assert whole.next_page_token == ""
    assert {request.filter.request_id for request in server.requests("ListTransfers")} == {"r"}
    some = await client.list_transfers(limit=4)
    assert [row.transfer_id for row in some.transfers] == ["0-0", "0-1", "0-2", "1-0"]
    with pytest.raises(ValueError, match="limit"):
        await client.list_transfers(limit=0)


async def test_a_server_that_repeats_a_page_does_not_hold_the_client(server: FakeServer, client: Client) -> None:
    server.answers["ListPins"] = lambda request, context: ListPinsResponse(next_page_token="again")
    with pytest.raises(InternalError):
        await client.pins()


async def test_the_error_of_a_call_is_typed(server: FakeServer, client: Client) -> None:
    server.answers["AllocateBlocks"] = failing(grpc.StatusCode.RESOURCE_EXHAUSTED, "POOL_EXHAUSTED")
    server.answers["FinishedBlocks"] = failing(grpc.StatusCode.FAILED_PRECONDITION, "BLOCK_PINNED")
    with pytest.raises(Exhausted) as exhausted:
        await client.allocate(1)
    assert exhausted.value.reason is Reason.POOL_EXHAUSTED
    with pytest.raises(PreconditionFailed) as failed:
        await client.finished_blocks([1], [2])
    assert failed.value.reason is Reason.BLOCK_PINNED
