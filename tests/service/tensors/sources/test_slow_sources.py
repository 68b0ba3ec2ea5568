"""A source that does not answer is told by a bounded number of calls, which end with the life of the engine."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvgrpc.errors import Exhausted, KVGrpcError, Reason
from kvgrpc.service.tensors import messages
from kvgrpc.service.tensors.staging_store import TELLING_MAX, StagingStore
from kvgrpc.v1 import common_pb2, tensor_pb2
from tests.service.tensors.leads import KEY, life_of, served, stored
from tests.service.tensors.stores import name_of


@contextmanager
def silent() -> Iterator[tensor_pb2.ReleaseTensorsRequest]:
    """Yields a release for a source that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = common_pb2.PeerAddress(address="127.0.0.1:{1}".format(*server.getsockname()))
        yield tensor_pb2.ReleaseTensorsRequest(transfer_key=KEY, names=[name_of(KEY)], source=source)


async def test_one_more_call_than_may_tell_sources_is_refused_and_releases_nothing(staging: StagingStore) -> None:
    with silent() as request:
        calls = [asyncio.create_task(messages.release(staging, request, "")) for _ in range(TELLING_MAX)]
        await asyncio.sleep(0)
        tensor = stored(life_of(staging), "b")
        more = tensor_pb2.ReleaseTensorsRequest(transfer_key=KEY, source=request.source)
        with pytest.raises(Exhausted) as raised:
            await messages.release(staging, more, "")
        assert raised.value.reason is Reason.QUEUE_FULL
        assert not tensor.gone
        here = await messages.release(staging, tensor_pb2.ReleaseTensorsRequest(transfer_key=KEY), "")
        assert here.released_count == 1
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_a_call_that_tells_a_source_ends_with_its_server() -> None:
    with silent() as request:
        async with served() as server:
            call = asyncio.create_task(messages.release(server._staging, request, ""))
            await asyncio.sleep(0)
            await server.stop()
            with pytest.raises(KVGrpcError) as raised:
                await call
            assert raised.value.reason is Reason.ENGINE_LOST
