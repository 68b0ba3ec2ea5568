"""The answering side of a stream of calls between leads: what holds for a unary call holds for each call."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from kvgrpc.config import Config, PoolConfig
from kvgrpc.core import actions
from kvgrpc.errors import InternalError, KVGrpcError, PreconditionFailed, Reason
from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.server import Server
from kvgrpc.service import telemetry
from kvgrpc.service.lead import Lead
from kvgrpc.service.places import Places
from kvgrpc.service.rpc import converse
from kvgrpc.service.rpc.converse import Conversation
from kvgrpc.wire.accesses import CALLS
from tests.service.api import read_refusal, refused
from tests.service.consumer import Consumer
from tests.service.engines import Engine, unchanged, wait_until
from tests.service.streamed import info_of
from tests.service.values import dur

TRACE = f"00-{'4b' * 16}-{'7a' * 8}-01"


@pytest.fixture
async def lead() -> AsyncIterator[Lead]:
    """Yields the lead of a server in this process."""
    server = Server(Config(listen="127.0.0.1:0", data_paths=("shm",), pool=PoolConfig(blocks=8, layers=1)))
    await server.start()
    yield server._lead
    await server.stop()


class Held:
    """Replaces the node of a lead: calls wait until the test answers them."""

    def __init__(self, lead: Lead, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answered: dict[int, Callable[[Any], None]] = {}
        self.abandoned: list[int] = []
        monkeypatch.setattr(lead, "check_caller", lambda _: None)
        monkeypatch.setattr(lead.runner, "submit", lambda number, _, answered: self.answered.update({number: answered}))
        monkeypatch.setattr(lead.runner, "abandon", self.abandoned.append)

    def answer(self, reply: actions.Answer | KVGrpcError) -> None:
        """Answers the call that has waited longest."""
        number = next(iter(self.answered))
        made = reply if isinstance(reply, KVGrpcError) else actions.Reply(number, reply, 0)
        self.answered.pop(number)(made)


@pytest.fixture
def held(lead: Lead, monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(lead, monkeypatch)


class Spans:
    """Records the spans of calls: their names and traces, and how they ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[tuple[str, str]] = []
        self.ended: list[Exception | None] = []
        monkeypatch.setattr(telemetry, "server_call", self._begin)

    def _begin(self, name: str, trace: str) -> tuple[str, telemetry.Ended]:
        self.begun.append((name, trace))
        return trace, self.ended.append


class Stream:
    """The context of a stream, served by a conversation."""

    def __init__(self, lead: Lead, places: Places | None = None) -> None:
        self.sent: asyncio.Queue[object] = asyncio.Queue()
        self.answers: list[peer_pb2.PeerAnswer] = []
        conversation = Conversation(lead, self, places or Places("calls", 100, 100, 0.1))
        self._served = asyncio.create_task(self._serve(lead, conversation))

    async def _serve(self, lead: Lead, conversation: Conversation) -> None:
        with lead.standing.one():
            await conversation.run()

    async def say(self, *calls: peer_pb2.PeerCall) -> None:
        """Sends calls, and lets the conversation take them."""
        self.sent.put_nowait(peer_pb2.ConverseRequest(calls=calls))
        await self.rest()

    async def rest(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def end(self) -> None:
        self._served.cancel()
        await asyncio.gather(self._served, return_exceptions=True)

    async def half_close(self) -> "asyncio.Task[None]":
        self.sent.put_nowait(grpc.aio.EOF)
        await self.rest()
        return self._served

    # -- the context

    async def send_initial_metadata(self, metadata: object) -> None:
        pass

    async def read(self) -> object:
        return await self.sent.get()

    async def write(self, message: peer_pb2.ConverseResponse) -> None:
        self.answers.extend(message.answers)


def settle(call_id: int, **fields: Any) -> peer_pb2.PeerCall:
    return peer_pb2.PeerCall(call_id=call_id, settle_access=peer_pb2.SettleAccessRequest(), **fields)


def refusals(stream: Stream) -> dict[int, str]:
    """Returns the reasons of the answers that are errors."""
    return {row.call_id: info_of(row.error.details).reason for row in stream.answers if row.HasField("error")}


def test_every_call_of_the_schema_is_served() -> None:
    fields = peer_pb2.PeerCall.DESCRIPTOR.oneofs_by_name["call"].fields
    assert converse._METHODS.keys() == CALLS.keys() == {field.name for field in fields}


async def test_a_call_whose_time_is_over_is_given_up_and_not_answered(lead: Lead, held: Held) -> None:
    stream = Stream(lead)
    await stream.say(settle(1, timeout=dur(0.01)), settle(2), settle(3, timeout=dur(60)))
    first = next(iter(held.answered))
    await asyncio.to_thread(wait_until, lambda: bool(held.abandoned))
    assert held.abandoned == [first]
    assert stream.answers == []
    held.answered.pop(first)
    held.answer(actions.Verdicts(()))
    held.answer(actions.Verdicts(()))
    await stream.rest()
    assert [answer.call_id for answer in stream.answers] == [2, 3]
    await stream.end()
    assert held.abandoned == [first]


@pytest.mark.parametrize("seconds", [0, -1])
def test_the_time_of_a_call_is_positive(source: Engine, seconds: int) -> None:
    consumer = Consumer(source)
    consumer.handshake()
    with unchanged(source), refused(source.api, "INVALID_ARGUMENT", "INVALID_FIELD"):
        consumer.ask(peer_pb2.SettleAccessRequest(), timeout={"seconds": seconds})


async def test_a_call_that_waits_takes_a_place_among_the_calls_of_its_connection(lead: Lead, held: Held) -> None:
    stream, other = (Stream(lead, places := Places("calls", 2, 3, 0.1, own=0)), Stream(lead, places))
    await stream.say(settle(1), settle(2), settle(3))
    assert refusals(stream) == {3: "LIMIT_EXCEEDED"}
    await other.say(settle(4))
    assert refusals(other) == {4: "LIMIT_EXCEEDED"}, "streams of one connection share its places"
    held.answer(actions.Verdicts(()))
    await stream.say(settle(5))
    assert refusals(stream).keys() == {3}
    await stream.end()
    await other.say(settle(6), settle(7))
    assert refusals(other).keys() == {4}, "the end of a stream frees the places of its calls"
    await other.end()


async def test_the_span_of_a_call_ends_however_the_call_ends(
    lead: Lead, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans, stream = Spans(monkeypatch), Stream(lead)
    await stream.say(settle(1, traceparent=TRACE), settle(2, traceparent="none"), settle(3, timeout=dur(0.01)))
    await stream.say(settle(4))
    assert spans.begun == [("kvgrpc.peer.v1.PeerService/SettleAccess", trace) for trace in (TRACE, "", "", "")]
    held.answer(actions.Verdicts(()))
    held.answer(PreconditionFailed(Reason.NO_HANDSHAKE, "no"))
    await asyncio.to_thread(wait_until, lambda: len(spans.ended) == 3)
    await stream.end()
    reasons = [error.reason if isinstance(error, KVGrpcError) else None for error in spans.ended]
    assert reasons == [None, Reason.NO_HANDSHAKE, Reason.DEADLINE, Reason.PEER_UNREACHABLE]


async def test_an_answer_that_cannot_be_written_fails_its_own_call_only(
    lead: Lead, held: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_answer: object, into: peer_pb2.SettleAccessResponse) -> None:
        into.results.add()
        raise ValueError("out of range")

    stream = Stream(lead)
    method = converse._METHODS["settle_access"]
    await stream.say(settle(1), settle(2))
    with monkeypatch.context() as patched:
        patched.setitem(converse._METHODS, "settle_access", converse._PeerMethod(method.to_event, broken))
        held.answer(actions.Verdicts(()))
    held.answer(actions.Verdicts(()))
    await stream.rest()
    assert refusals(stream) == {1: "INTERNAL"}
    assert [answer.WhichOneof("answer") for answer in stream.answers] == ["error", "settle_access"]
    assert "SettleAccess failed" in caplog.text
    await stream.end()


async def test_a_call_that_cannot_be_converted_fails_alone(
    lead: Lead, held: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> Any:
        raise ValueError("a defect")

    method = converse._METHODS["close_access"]
    monkeypatch.setitem(converse._METHODS, "close_access", converse._PeerMethod(broken, method.put_answer))
    stream = Stream(lead)
    await stream.say(peer_pb2.PeerCall(call_id=1, close_access=peer_pb2.CloseAccessRequest()), settle(2))
    held.answer(InternalError(Reason.INTERNAL_DEFECT, "no"))
    await stream.rest()
    assert refusals(stream) == {1: "INTERNAL", 2: "INTERNAL_DEFECT"}
    assert "CloseAccess failed" in caplog.text
    await stream.end()


async def test_a_caller_that_makes_no_more_calls_gets_the_answers_to_the_last(lead: Lead, held: Held) -> None:
    stream = Stream(lead)
    await stream.say(settle(1), settle(2))
    served = await stream.half_close()
    assert not served.done()
    held.answer(actions.Verdicts(()))
    held.answer(actions.Verdicts(()))
    await served
    assert [answer.call_id for answer in stream.answers] == [1, 2]


async def test_calls_of_a_stream_that_ends_are_given_up(lead: Lead, held: Held) -> None:
    stream = Stream(lead)
    await stream.say(settle(1), settle(2, timeout=dur(60)))
    await stream.end()
    assert sorted(held.abandoned) == sorted(held.answered)


def test_a_stream_that_shows_a_ticket_of_no_engine_is_refused(source: Engine) -> None:
    with unchanged(source), pytest.raises(grpc.RpcError) as caught:
        list(source.api.peer.Converse(iter([]), timeout=10, metadata=(("kvgrpc-ticket", "00" * 32),)))
    refusal = read_refusal("Converse", caught.value)
    assert (refusal.code, refusal.reason) == ("PERMISSION_DENIED", "NOT_OWNER")


class Caller:
    """The context of a stream. Its caller sends on, and takes answers only when `takes` is set."""

    def __init__(self, messages: Iterator[peer_pb2.ConverseRequest]) -> None:
        self._messages = messages
        self.log: list[str] = []
        self.writing = asyncio.Event()
        self.takes = asyncio.Event()

    async def send_initial_metadata(self, metadata: object) -> None:
        pass

    async def read(self) -> object:
        self.log.append("read")
        await self.writing.wait()
        return next(self._messages, grpc.aio.EOF)

    async def write(self, message: peer_pb2.ConverseResponse) -> None:
        self.writing.set()
        await self.takes.wait()
        self.log.append(f"wrote {len(message.answers)}")


async def test_who_does_not_take_a_late_answer_is_not_read_any_further(lead: Lead) -> None:
    calls = [peer_pb2.PeerCall(call_id=number) for number in range(1, 101)]
    caller = Caller(iter([peer_pb2.ConverseRequest(calls=calls)] * 2))
    conversation = Conversation(lead, caller, Places("calls", 100, 100, 0.1))
    conversation._take(peer_pb2.PeerCall(call_id=101))  # its answer is not part of any reading

    async def serve() -> None:
        with lead.standing.one():
            await conversation.run()

    served = asyncio.create_task(serve())
    await caller.writing.wait()
    for _ in range(100):  # turns of the loop, so that the conversation would go on if it could
        await asyncio.sleep(0)
    assert caller.log == ["read"]
    caller.takes.set()
    await served
    assert caller.log == ["read", "wrote 1", "wrote 100", "read", "wrote 100", "read"]
