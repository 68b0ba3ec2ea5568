"""An address for operators: AdminService, reflection and channelz are there and nowhere else."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from kvgrpc.client import Client, connect
from kvgrpc.config import Config
from kvgrpc.errors import KVGrpcError, PermissionDenied, Reason, Unavailable, Unimplemented
from kvgrpc.server import Server
from kvgrpc.tls import Tls
from tests.identity.servers import SMALL, People, serving

TIMEOUT_S = 20.0
BOTH = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    """A server that asks nobody who calls."""
    any_port, ready = "127.0.0.1:0", str(tmp_path / "ready.json")
    config = Config(
        listen=any_port, admin_listen=any_port, engine_id="e", pool=SMALL, data_paths=("shm",), ready_file=ready
    )
    made = Server(config)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


async def code(call: Any) -> str:
    """Returns how a call ends."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def looks(channel: grpc.aio.Channel) -> dict[str, str]:
    """Returns how a call of each service for tools ends."""
    found = {}
    for name in BOTH:
        call: Any = channel.stream_stream(
            f"/{name}/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        )(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=TIMEOUT_S)
        found[name] = await code(call.read())
        call.cancel()
    channelz = channelz_pb2_grpc.ChannelzStub(channel)
    found["channelz"] = await code(channelz.GetServers(channelz_pb2.GetServersRequest(), timeout=TIMEOUT_S))
    health = health_pb2_grpc.HealthStub(channel)
    found["health"] = await code(health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S))
    return found


async def test_services_for_tools_answer_at_the_address_for_operators_alone_and_health_at_both(server: Server) -> None:
    hidden = dict.fromkeys((*BOTH, "channelz"), "UNIMPLEMENTED")
    for address, expected in ((server.address, hidden), (server.admin_address, dict.fromkeys(hidden, "OK"))):
        async with grpc.aio.insecure_channel(address) as channel:
            assert await looks(channel) == expected | {"health": "OK"}


async def _asked_alone_and_over_a_stream(client: Client) -> list[type[KVGrpcError] | None]:
    """Returns how GetStatus ends as an RPC, and then over a stream of calls."""
    found: list[type[KVGrpcError] | None] = []
    for _ in range(2):
        try:
            await client.status()
            found.append(None)
        except KVGrpcError as error:
            found.append(type(error))
        await client.capabilities()  # after it the stream is there
    return found


async def test_the_admin_service_answers_at_the_address_for_operators_alone_whatever_carries_the_call(
    server: Server,
) -> None:
    for address, end in ((server.address, Unimplemented), (server.admin_address, None)):
        async with connect(address) as client:
            assert await _asked_alone_and_over_a_stream(client) == [end, end]


async def test_all_other_services_answer_at_both_addresses_and_grants_name_the_first(
    server: Server, tmp_path: Path
) -> None:
    ready = json.loads((tmp_path / "ready.json").read_text())
    assert (ready["address"], ready["admin_address"]) == (server.address, server.admin_address)
    async with connect(server.address) as one, connect(server.admin_address) as other:
        assert (await one.capabilities()).engine.address == server.address
        assert (await other.capabilities()).engine.address == server.address


async def test_the_address_for_operators_asks_who_calls_and_for_roles(tmp_path: Path) -> None:
    people = People(tmp_path)
    people.give(operator="operator", viewer="viewer", router="router")
    async with serving(people, "e", admin_listen="127.0.0.1:0") as server:
        _, _, port = server.admin_address.rpartition(":")
        admin = f"localhost:{port}"

        def client(name: str) -> Client:
            return connect(admin, credentials=Tls(people.files(name)).channel_credentials())

        async with client("operator") as operator, client("viewer") as viewer, client("stranger") as stranger:
            await operator.audit_records()
            await viewer.audit_records()
            for who in (viewer, stranger):
                with pytest.raises(PermissionDenied) as refused:
                    await who.start_drain()
                assert refused.value.reason is Reason.ROLE_MISSING
        async with connect(admin) as plain:
            with pytest.raises(Unavailable):
                await plain.status()


async def test_a_taken_address_for_operators_ends_the_start_and_leaves_the_first_one_free(server: Server) -> None:
    taken = Config(listen="127.0.0.1:0", admin_listen=server.admin_address, pool=SMALL, data_paths=("shm",))
    with pytest.raises(Unavailable, match=server.admin_address):
        await Server(taken).start()
