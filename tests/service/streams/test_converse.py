"""Calls between leads over one stream, in any number, with answers that are taken or not."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from kvgrpc.config import Config, PoolConfig
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import KVGrpcError, Reason
from kvgrpc.peer.v1 import peer_pb2, peer_pb2_grpc
from kvgrpc.server import Server
from kvgrpc.service.peers.stream import PeerStream
from kvgrpc.service.rpc.converse import Conversation
from kvgrpc.service.rpc.server import channel_options
from kvgrpc.wire.bounds import CALLS_MAX
from tests.service.engines import Engine, wait_until
from tests.service.values import new_key


def long_call(blocks: int) -> peer_pb2.PeerCall:
    """Returns a PartsReady of blocks that are not contiguous."""
    call = peer_pb2.PeerCall()
    call.parts_ready.access_id = new_key()
    runs = call.parts_ready.parts.add().blocks.add().runs
    runs.starts.extend(range(0, 2 * blocks, 2))
    runs.counts.extend([1] * blocks)
    return call


@pytest.mark.parametrize(("count", "blocks"), [(24, 60_000), (CALLS_MAX + 100, 1)])
async def test_calls_too_many_for_one_message_go_in_several(source: Engine, count: int, blocks: int) -> None:
    async with grpc.aio.insecure_channel(source.address, options=channel_options(Limits())) as channel:
        stream = PeerStream(peer_pb2_grpc.PeerServiceStub(channel), "peer", peer_pb2.Caller())
        stream.start()
        await asyncio.to_thread(wait_until, lambda: stream.usable)
        calls = [long_call(blocks) for _ in range(count)]
        found: list[Any] = []
        over = asyncio.Event()

        def answered(answer: Any) -> None:
            found.append(answer)
            if len(found) == count:
                over.set()

        for call in calls:
            stream.call(call, 120.0, answered)
        await over.wait()
        assert {answer.reason for answer in found if isinstance(answer, KVGrpcError)} == {Reason.NO_HANDSHAKE}
        assert stream.usable
        await stream.close(0)


@contextmanager
def babbling() -> Iterator[str]:
    """Yields the address of a server whose answers are no messages."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, handler_call_details: object) -> Any:
            return grpc.stream_stream_rpc_method_handler(self.answer)

        def answer(self, calls: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            context.send_initial_metadata(())
            next(calls)  # the caller's introduction
            for _ in calls:
                yield b"\xff\xff"

    server = grpc.server(ThreadPoolExecutor(2), handlers=[Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait(10)


async def test_a_stream_whose_answers_cannot_be_read_fails_its_calls_and_is_over() -> None:
    with babbling() as address:
        async with grpc.aio.insecure_channel(address) as channel:
            stream = PeerStream(peer_pb2_grpc.PeerServiceStub(channel), "peer", peer_pb2.Caller())
            stream.start()
            await asyncio.to_thread(wait_until, lambda: stream.usable)
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            stream.call(long_call(1), 120.0, answer.set_result)
            assert (await answer).reason is Reason.PEER_FAILED
            assert not stream.usable
            await stream.close(0)


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


async def test_who_does_not_take_a_late_answer_is_not_read_any_further() -> None:
    server = Server(Config(listen="127.0.0.1:0", data_paths=("shm",), pool=PoolConfig(blocks=8, layers=1)))
    await server.start()
    lead = server._lead
    calls = [peer_pb2.PeerCall(call_id=number) for number in range(1, 101)]
    caller = Caller(iter([peer_pb2.ConverseRequest(calls=calls)] * 2))
    conversation = Conversation(lead, caller)
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
    await server.stop()
    assert caller.log == ["read", "wrote 1", "wrote 100", "read", "wrote 100", "read"]
