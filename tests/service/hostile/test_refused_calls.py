"""A refused call leaves nothing behind: neither its message nor any object made from it."""

from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

import grpc
import pytest

from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import common_pb2, handoff_pb2, lease_pb2, scheduler_pb2, transfer_pb2
from tests.service.api import read_refusal, refused
from tests.service.consumer import Consumer
from tests.service.engines import Engine
from tests.service.footprint import resident_bytes
from tests.service.pushes import cancel_key, reserve
from tests.service.streamed import info_of
from tests.service.values import content, for_readers, group, named_blocks, new_key, prompt

CALLS = 60
WARM_UP = 20
"""Number of messages after which the allocator reuses memory for later ones."""
KEPT_BYTES_MAX = 20_000_000
"""Maximum memory kept of `CALLS` messages of 1 MB each, in bytes."""
TEXT = "x" * 1_000_000
CALLER = peer_pb2.Caller(engine_id="stranger", incarnation=1)


def refused_by_the_node() -> Any:
    """Returns a hand-over with content of 300,000 tokens, in a block that is not allocated."""
    return for_readers(
        transfer_key=new_key(), content=content(range(65_536, 365_536)), blocks=named_blocks(1, group([1]))
    )


CALLERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "by the node": ("v1.HandoffService/FinishedBlocks", refused_by_the_node),
    "by the node, with a key": (
        "v1.HandoffService/FinishedBlocks",
        lambda: for_readers(
            transfer_key=new_key(),
            idempotency_key="one for each",
            content=content(range(65_536, 365_536)),
            blocks=named_blocks(1, group([1])),
        ),
    ),
    "when it is converted": (
        "v1.TransferService/CancelTransfer",
        lambda: transfer_pb2.CancelTransferRequest(transfer_id=TEXT),
    ),
    "when its grant is read": (
        "v1.HandoffService/PullBlocks",
        lambda: handoff_pb2.PullBlocksRequest(grant=common_pb2.Grant(token=TEXT.encode()), request_id="r"),
    ),
    "of a watch": (
        "v1.TransferService/WatchTransfers",
        lambda: transfer_pb2.WatchTransfersRequest(
            filter=transfer_pb2.TransferFilter(request_id=TEXT), incarnation=1, after_event_seq=1
        ),
    ),
}
CALLERS |= {
    "of a stream, for its calls": (
        "peer.v1.PeerService/Converse",
        lambda: peer_pb2.ConverseRequest(calls=[peer_pb2.PeerCall(call_id=1, traceparent="x" * 200)] * 5_000),
    ),
    "of a stream, for what it asks": (
        "v1.LeaseService/KeepAlive",
        lambda: lease_pb2.KeepAliveRequest(leases=[lease_pb2.LeaseRef(lease_id="x" * 8)] * 80_000),
    ),
}


@pytest.mark.parametrize("who", CALLERS)
def test_refused_calls_keep_no_memory_however_long_they_were(source: Engine, who: str) -> None:
    rpc, make = CALLERS[who]
    body = make().SerializeToString()
    assert len(body) > 900_000
    channel: Any = source.api.channel
    name = f"/kvgrpc.{rpc}"

    def call() -> None:
        if who.startswith("of a watch"):
            list(channel.unary_stream(name)(body, timeout=60))
        elif who.startswith("of a stream"):
            list(channel.stream_stream(name)(iter([body]), timeout=60))
        else:
            channel.unary_unary(name)(body, timeout=60)

    def refuse() -> None:
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert read_refusal(rpc, caught.value).reason

    for _ in range(WARM_UP):
        refuse()
    before = resident_bytes(source.process.pid)
    for _ in range(CALLS):
        refuse()
    assert resident_bytes(source.process.pid) - before < KEPT_BYTES_MAX


def test_refused_calls_of_a_stream_keep_no_memory(source: Engine) -> None:
    closing = peer_pb2.CloseAccessRequest(closings=[peer_pb2.AccessClosing(access_id=b"a" * 16, message=TEXT)])
    message = peer_pb2.ConverseRequest(calls=[peer_pb2.PeerCall(call_id=1, close_access=closing)], caller=CALLER)
    turns = iter(range(WARM_UP + CALLS))
    seen = []

    def messages() -> Iterator[peer_pb2.ConverseRequest]:
        for _ in turns:
            yield message

    for reply in source.api.peer.Converse(messages(), timeout=60):
        for answer in reply.answers:
            assert info_of(answer.error.details).reason == "NO_HANDSHAKE"
            seen.append(resident_bytes(source.process.pid))
    assert len(seen) == WARM_UP + CALLS
    assert seen[-1] - seen[WARM_UP] < KEPT_BYTES_MAX


def test_requests_of_a_scheduler_that_the_node_refuses_keep_no_memory(source: Engine, destination: Engine) -> None:
    key = new_key()
    target = reserve(destination, key, prompt(40), destination.allocate(3)).grant
    cancel_key(source, key)
    arrived = scheduler_pb2.RequestArrivedRequest(
        request_id="r",
        prompt=content(range(65_536, 365_536)),
        give=scheduler_pb2.KvGift(mode=common_pb2.TRANSFER_MODE_PUSH),
        target=target,
        intent=common_pb2.Intent(transfer_key=key),
    )

    def refuse() -> None:
        with refused(source.api, "FAILED_PRECONDITION", "CANCELLED"):
            source.api.scheduler.RequestArrived(arrived)

    for _ in range(WARM_UP):
        refuse()
    before = resident_bytes(source.process.pid)
    for _ in range(CALLS):
        refuse()
    assert resident_bytes(source.process.pid) - before < KEPT_BYTES_MAX


STREAMS: dict[str, Callable[[Consumer], Any]] = {
    "peer.v1.PeerService/Converse": lambda _: peer_pb2.ConverseRequest(calls=[peer_pb2.PeerCall(call_id=1)]),
    "peer.v1.PeerService/KeepLiveness": lambda consumer: peer_pb2.KeepLivenessRequest(caller=consumer.caller),
    "v1.LeaseService/KeepAlive": lambda _: lease_pb2.KeepAliveRequest(leases=[lease_pb2.LeaseRef(lease_id="x")]),
    "v1.SchedulerService/Schedule": lambda _: scheduler_pb2.ScheduleRequest(),
}


@pytest.mark.parametrize("rpc", STREAMS)
def test_a_stream_that_waits_for_its_next_message_keeps_none_of_those_before(source: Engine, rpc: str) -> None:
    consumer = Consumer(source)
    consumer.handshake()
    valid: bytes = STREAMS[rpc](consumer).SerializeToString()
    unknown = b"\xc2\xa9\x07\x80\x89\x7a" + b"x" * 2_000_000  # an unknown field of two million bytes
    channel: Any = source.api.plain
    call = channel.stream_stream(f"/kvgrpc.{rpc}", request_serializer=bytes, response_deserializer=bytes)
    over = Event()

    def messages() -> Iterator[bytes]:
        yield valid + unknown
        over.wait()

    def stand(count: int) -> list[Any]:
        streams = []
        for _ in range(count):
            streams.append(call(messages(), timeout=60))
            next(streams[-1])
        return streams

    streams = stand(8)
    before = resident_bytes(source.process.pid)
    streams += stand(30)
    kept = resident_bytes(source.process.pid) - before
    over.set()
    for stream in streams:
        list(stream)
    assert kept < KEPT_BYTES_MAX
