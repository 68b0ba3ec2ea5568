"""Callers over real sockets: which name they have, and what callers without one hear."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from cryptography import x509

from kvgrpc.client import connect
from kvgrpc.config import Config
from kvgrpc.config_security import IdentityConfig
from kvgrpc.errors import PermissionDenied, PreconditionFailed, Reason, Unauthenticated
from kvgrpc.peer.v1 import rank_pb2, rank_pb2_grpc
from kvgrpc.server import Server
from kvgrpc.service.grpc_status import from_rpc_error
from kvgrpc.tls import Tls
from kvgrpc.v1 import pool_pb2, pool_pb2_grpc
from tests.identity.issuer import Issuer, bearer
from tests.identity.servers import CA, SMALL, People, serving, spiffe

ISSUER = Issuer()


@pytest.fixture
def people(tmp_path: Path) -> People:
    people = People(tmp_path)
    people.give(proxy="router", router="router", viewer="viewer")
    return people


async def owners(server: Server, people: People, name: str, metadata: dict[str, str]) -> set[str]:
    """Returns the owners of all allocations after that caller has made one."""
    async with people.client(server, name, metadata=metadata) as client:
        await client.allocate(1, ttl_s=60)
        async with people.channel(server, name) as channel:
            stub: Any = pool_pb2_grpc.PoolServiceStub(channel)
            listed = await stub.ListAllocations(
                pool_pb2.ListAllocationsRequest(), metadata=tuple(metadata.items()), timeout=20
            )
    return {row.owner for row in listed.allocations}


async def test_what_a_caller_makes_belongs_to_its_name_over_all_its_connections(people: People) -> None:
    async with serving(people, "e") as server:
        async with people.client(server, "router") as first:
            taken = await first.allocate(1, ttl_s=60)
        async with people.client(server, "proxy") as other:
            with pytest.raises(PreconditionFailed):
                await other.free(taken)
        async with people.client(server, "router") as second:
            await second.free(taken)
        assert await owners(server, people, "router", {}) == {spiffe("router")}


async def test_a_token_names_its_caller_whatever_the_certificate_says(people: People, tmp_path: Path) -> None:
    people.roles.write_text('[[callers]]\nname = "jwt:alice"\nroles = ["router"]\n')
    async with serving(people, "e", tokens=ISSUER.config(tmp_path / "key.pem")) as server:
        shown = {"authorization": bearer(ISSUER.token("alice"))}
        assert await owners(server, people, "proxy", shown) == {"jwt:alice"}
        async with people.client(server, "proxy") as without:
            with pytest.raises(PermissionDenied):
                await without.allocate(1)


@pytest.fixture
async def plain(people: People, tmp_path: Path) -> AsyncIterator[Server]:
    """A server without TLS that takes tokens."""
    people.roles.write_text('[[callers]]\nname = "jwt:*"\nroles = ["router"]\n')
    tokens, identity = ISSUER.config(tmp_path / "key.pem"), IdentityConfig(roles=str(people.roles))
    config = Config(listen="127.0.0.1:0", pool=SMALL, data_paths=("shm",), tokens=tokens, identity=identity)
    server = Server(config)
    await server.start()
    yield server
    await server.stop()


async def test_a_bad_token_or_none_is_unauthenticated_and_changes_nothing(plain: Server) -> None:
    bad = [{}, {"authorization": "Basic x"}, {"authorization": bearer(ISSUER.token(aud="another"))}]
    for metadata in bad:
        async with connect(plain.address, metadata=metadata) as client:
            with pytest.raises(Unauthenticated) as refused:
                await client.allocate(1)
            assert refused.value.reason is Reason.NOT_AUTHENTICATED
    assert plain._lead.gate.denied[Reason.NOT_AUTHENTICATED] == len(bad)
    assert plain._lead.runner.node.state.pool.allocator.allocated(0) == 0
    async with connect(plain.address, metadata={"authorization": bearer(ISSUER.token())}) as client:
        await client.allocate(1)


async def test_a_megabyte_of_metadata_ends_that_call_and_the_server_goes_on(plain: Server) -> None:
    huge = bearer(ISSUER.token(more="x" * (1 << 20)))
    async with grpc.aio.insecure_channel(plain.address) as channel:
        stub: Any = pool_pb2_grpc.PoolServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.AllocateBlocks(pool_pb2.AllocateBlocksRequest(), metadata=(("authorization", huge),), timeout=20)
    async with connect(plain.address, metadata={"authorization": bearer(ISSUER.token())}) as client:
        await client.allocate(1)


async def test_a_certificate_without_a_name_has_no_role_even_without_a_file(people: People, tmp_path: Path) -> None:
    files = CA.issue(tmp_path / "nameless", (x509.RFC822Name("root@example.test"),))  # type: ignore[arg-type]
    async with serving(people, "e", roles=False) as server:
        channel = connect(server.address, credentials=Tls(files).channel_credentials())
        async with channel as client:
            with pytest.raises(Unauthenticated):
                await client.allocate(1)


async def test_a_rank_without_the_role_is_refused_before_its_ticket_is_looked_at(people: People) -> None:
    async with serving(people, "e") as server, people.channel(server, "router") as channel:
        stub: Any = rank_pb2_grpc.RankServiceStub(channel)
        stream = stub.ConnectRank(timeout=20)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream.read()
        assert from_rpc_error(refused.value).reason is Reason.ROLE_MISSING
        assert rank_pb2.ConnectRankRequest.DESCRIPTOR.full_name not in str(refused.value)


async def test_a_ticket_gives_no_role(people: People) -> None:
    told = {"kvgrpc-ticket": "00"}
    async with serving(people, "e") as server, people.client(server, "viewer", metadata=told) as client:
        with pytest.raises(PermissionDenied) as refused:
            await client.allocate(1)
        assert refused.value.reason is Reason.ROLE_MISSING
