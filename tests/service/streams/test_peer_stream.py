"""The calling side of a stream of calls between leads: the stream opens with its first call, and every call ends."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import grpc
import grpc.aio
import pytest

from kvgrpc.core.values.limits import MESSAGE_BYTES, Limits
from kvgrpc.errors import FieldViolation, KVGrpcError, OutOfRange, Reason, Unavailable, Unimplemented
from kvgrpc.peer.v1 import peer_pb2, peer_pb2_grpc
from kvgrpc.service.peers.stream import ENVELOPE_BYTES, PeerStream
from kvgrpc.service.rpc.server import connector
from kvgrpc.wire.bounds import CALLS_MAX
from tests.service.consumer import Consumer
from tests.service.engines import Engine, wait_until
from tests.service.values import new_key

CALLER = peer_pb2.Caller(engine_id="d", incarnation=7, proof=bytes(32))
LATE_S = 30.0
"""Deadline of calls that are answered, in seconds."""


class Answering(grpc.GenericRpcHandler):
    """A server that answers each message as `answer` says: with bytes, which may be no message, or not at all."""

    def __init__(self, answer: Callable[[peer_pb2.ConverseRequest], bytes | None]) -> None:
        self.heard: list[peer_pb2.ConverseRequest] = []
        self._answer = answer
        self._server = grpc.server(ThreadPoolExecutor(4), handlers=[self])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def start(self) -> "Answering":
        self._server.start()
        return self

    def service(self, handler_call_details: object) -> Any:
        return grpc.stream_stream_rpc_method_handler(
            self._serve, request_deserializer=peer_pb2.ConverseRequest.FromString
        )

    def _serve(self, messages: Iterator[peer_pb2.ConverseRequest], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            self.heard.append(message)
            try:
                answer = self._answer(message)
            except KVGrpcError as error:
                context.abort(grpc.StatusCode[error.code], error.message)
            if answer is not None:
                yield answer

    @property
    def calls(self) -> list[peer_pb2.PeerCall]:
        return [call for message in self.heard for call in message.calls]

    def close(self) -> None:
        self._server.stop(0).wait(10)


def said(*answers: peer_pb2.PeerAnswer) -> bytes:
    return peer_pb2.ConverseResponse(answers=answers).SerializeToString()


def parts_taken(message: peer_pb2.ConverseRequest) -> bytes:
    """Answers every call as PartsReady."""
    rows = [
        peer_pb2.PeerAnswer(call_id=call.call_id, parts_ready=peer_pb2.PartsReadyResponse()) for call in message.calls
    ]
    return said(*rows)


def silence(_: peer_pb2.ConverseRequest) -> None:
    return None


def over(_: peer_pb2.ConverseRequest) -> bytes:
    raise OutOfRange(Reason.LIMIT_EXCEEDED, "no more of this")


class Calls:
    """A stream to one server, and the results of calls over it."""

    def __init__(self, address: str, caller: peer_pb2.Caller = CALLER, message_bytes: int = MESSAGE_BYTES) -> None:
        self._channel = connector(Limits(), None)(address)
        self.stream = PeerStream(peer_pb2_grpc.PeerServiceStub(self._channel), "p", caller, message_bytes)

    def begin(self, call: peer_pb2.PeerCall, timeout_s: float = LATE_S) -> "asyncio.Future[Any]":
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.stream.call(call, timeout_s, result.set_result)
        return result

    async def __aenter__(self) -> "Calls":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stream.close(0)
        await self._channel.close()


def parts(blocks: int = 1) -> peer_pb2.PeerCall:
    """Returns a PartsReady of blocks that are not contiguous."""
    call = peer_pb2.PeerCall()
    call.parts_ready.access_id = new_key()
    runs = call.parts_ready.parts.add().blocks.add().runs
    runs.starts.extend(range(0, 2 * blocks, 2))
    runs.counts.extend([1] * blocks)
    return call


@pytest.mark.parametrize(("count", "blocks"), [(24, 60_000), (CALLS_MAX + 100, 1)])
async def test_calls_too_many_for_one_message_go_in_several(source: Engine, count: int, blocks: int) -> None:
    async with Calls(source.address) as calls:
        answers = await asyncio.gather(*[calls.begin(parts(blocks), 120.0) for _ in range(count)])
        assert {answer.reason for answer in answers} == {Reason.NO_HANDSHAKE}


async def test_the_first_message_says_who_calls_and_each_call_for_how_long_and_in_which_trace() -> None:
    with closing(Answering(parts_taken).start()) as peer:
        async with Calls(peer.address) as calls:
            for number in range(2):
                call = parts()
                call.traceparent = f"trace {number}"
                assert isinstance(await calls.begin(call, 3.5), peer_pb2.PartsReadyResponse)
        assert [message.caller for message in peer.heard] == [CALLER, peer_pb2.Caller()]
        assert [call.traceparent for call in peer.calls] == ["trace 0", "trace 1"]
        assert {call.timeout.ToMilliseconds() for call in peer.calls} == {3_500}


async def test_calls_wait_in_their_order_until_the_stream_is_open() -> None:
    with closing(Answering(parts_taken)) as peer:  # connections to it are taken, and not answered yet
        async with Calls(peer.address) as calls:
            made = [parts() for _ in range(10)]
            answers = [calls.begin(call) for call in made]
            given_up = await calls.begin(parts(), 0.01)
            assert (type(given_up), given_up.reason) == (Unavailable, Reason.PEER_UNREACHABLE)
            assert "did not answer PartsReady in time" in given_up.message
            assert not any(answer.done() for answer in answers)
            peer.start()
            await asyncio.gather(*answers)
        access_ids = [call.parts_ready.access_id for call in peer.calls]
        assert access_ids == [call.parts_ready.access_id for call in made], "a call that is given up is not sent"


async def test_a_call_that_is_not_answered_in_time_may_be_made_again_and_ends_no_other() -> None:
    with closing(Answering(silence).start()) as peer:
        async with Calls(peer.address) as calls:
            other, late = calls.begin(parts()), await calls.begin(parts(), 0.05)
            assert (type(late), late.reason) == (Unavailable, Reason.PEER_UNREACHABLE)
            assert not other.done()


async def test_a_stream_that_cannot_be_opened_fails_the_calls_that_wait_for_it() -> None:
    async with Calls("127.0.0.1:1") as calls:
        errors = await asyncio.gather(*[calls.begin(parts()) for _ in range(3)])
        assert {(type(error), error.reason) for error in errors} == {(Unavailable, Reason.PEER_UNREACHABLE)}


async def test_a_server_without_such_streams_is_not_asked_again() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with Calls(f"127.0.0.1:{port}") as calls:
        assert isinstance(await calls.begin(parts()), Unimplemented)
    await server.stop(0)


async def test_the_end_of_a_stream_fails_its_calls_and_the_next_call_opens_another() -> None:
    turns = iter([over, parts_taken])

    def answer(message: peer_pb2.ConverseRequest) -> bytes:
        return next(turns)(message)

    with closing(Answering(answer).start()) as peer:
        async with Calls(peer.address) as calls:
            error = await calls.begin(parts())
            assert (type(error), error.reason) == (Unavailable, Reason.PEER_UNREACHABLE)
            assert "no more of this" in error.message
            assert isinstance(await calls.begin(parts()), peer_pb2.PartsReadyResponse)
        assert [message.caller for message in peer.heard] == [CALLER] * 2


@pytest.mark.parametrize(
    "message",
    [
        b"\xff\xff",
        peer_pb2.ConverseResponse(
            answers=[peer_pb2.PeerAnswer(call_id=1, post_send=peer_pb2.PostSendResponse())]
        ).SerializeToString(),
        peer_pb2.ConverseResponse(answers=[peer_pb2.PeerAnswer(call_id=1)]).SerializeToString(),
    ],
    ids=["no message", "another answer", "no answer"],
)
async def test_an_answer_that_is_none_fails_the_call(message: bytes) -> None:
    with closing(Answering(lambda _: message).start()) as peer:
        async with Calls(peer.address) as calls:
            assert (await calls.begin(parts())).reason is Reason.PEER_FAILED


async def test_a_call_that_its_reader_cannot_take_is_not_sent_and_ends_no_other() -> None:
    with closing(Answering(parts_taken).start()) as peer:
        fits = parts()
        async with Calls(peer.address, message_bytes=ENVELOPE_BYTES + fits.ByteSize()) as calls:
            good, long = calls.begin(fits), calls.begin(parts(2))
            assert (await long).reason is Reason.LIMIT_EXCEEDED
            assert isinstance(await good, peer_pb2.PartsReadyResponse)
        assert len(peer.calls) == 1


async def test_an_error_of_a_call_comes_with_all_its_details(source: Engine) -> None:
    consumer = Consumer(source)
    consumer.handshake()
    rows = [peer_pb2.AccessSettling(access_id=bytes(5_000))]
    long = peer_pb2.PeerCall(settle_access=peer_pb2.SettleAccessRequest(settlings=rows))
    async with Calls(source.address, consumer.caller) as calls:
        error = await calls.begin(long)
        assert (error.code, error.reason) == ("INVALID_ARGUMENT", Reason.INVALID_FIELD)
        assert error.violations == (FieldViolation("settlings.access_id", "has at most 4096 bytes"),)
        assert (error.metadata["engine_id"], error.metadata["next"]) == (source.engine_id, "FIX_REQUEST")


async def test_calls_in_flight_are_answered_before_a_stream_is_closed() -> None:
    with closing(Answering(parts_taken).start()) as peer:
        async with Calls(peer.address) as calls:
            answer = calls.begin(parts())
            await calls.stream.close(LATE_S)
            assert isinstance(answer.result(), peer_pb2.PartsReadyResponse)


async def test_what_is_not_answered_by_the_end_of_a_stream_fails() -> None:
    with closing(Answering(silence).start()) as peer:
        async with Calls(peer.address) as calls:
            answer = calls.begin(parts())
            await asyncio.to_thread(wait_until, lambda: bool(peer.calls))
            await calls.stream.close(0)
            assert isinstance(answer.result(), Unavailable)
