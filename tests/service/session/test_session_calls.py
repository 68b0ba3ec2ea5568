"""Calls of a session become events."""

import pytest

from kvgrpc.config import Config, PoolConfig
from kvgrpc.errors import InvalidRequest
from kvgrpc.server import Server
from kvgrpc.service.session.session_calls import call_to_event
from kvgrpc.session.v1 import session_pb2
from kvgrpc.v1 import handoff_pb2, transfer_pb2


@pytest.mark.parametrize(
    "call",
    [
        session_pb2.Call(pull_blocks=handoff_pb2.PullBlocksRequest(wait=transfer_pb2.TransferWait())),
        session_pb2.Call(reserve_blocks=handoff_pb2.ReserveBlocksRequest(wait=transfer_pb2.TransferWait())),
    ],
    ids=["pull", "reservation"],
)
async def test_a_call_of_a_session_does_not_wait(call: session_pb2.Call) -> None:
    server = Server(Config(listen="127.0.0.1:0", data_paths=("shm",), pool=PoolConfig(blocks=8, layers=1)))
    await server.start()
    try:
        with pytest.raises(InvalidRequest) as caught:
            call_to_event(server._lead, call, 1)
    finally:
        await server.stop()
    assert caught.value.violations[0].field.endswith(".wait")
