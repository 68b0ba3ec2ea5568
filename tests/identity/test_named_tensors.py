"""Named tensors of tenants over real sockets: another tenant's answer as unknown ones."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvgrpc.client import Client
from kvgrpc.config import TensorsConfig
from kvgrpc.errors import AlreadyExists, DeadlineExceeded, KVGrpcError, NotFound, Reason
from kvgrpc.server import Server
from kvgrpc.v1 import tensor_pb2, tensor_pb2_grpc
from tests.identity.servers import People, serving
from tests.service.tensors.stores import PAGE, PAGES, described, name_of

STORE = TensorsConfig(store_bytes=PAGES * PAGE, page_bytes=PAGE)
SHORT_S = 0.2
"""Time in which what is not known does not come, in seconds."""


@pytest.fixture
def people(tmp_path: Path) -> People:
    people = People(tmp_path)
    tenants = {"red": "router@red", "blue": "router@blue", "redviewer": "viewer@red", "blueviewer": "viewer@blue"}
    people.give(p="peer", d="peer", house="router engine operator viewer", **tenants)
    return people


@pytest.fixture
async def servers(people: People) -> AsyncIterator[tuple[Server, Server]]:
    async with serving(people, "p", tensors=STORE) as p, serving(people, "d", tensors=STORE) as d:
        yield p, d


Callers = Callable[[Server, str], Client]


@pytest.fixture
async def caller(people: People) -> AsyncIterator[Callers]:
    async with AsyncExitStack() as stack:
        made: dict[tuple[int, str], Client] = {}

        def begin(server: Server, name: str) -> Client:
            at = id(server), name
            if at not in made:
                made[at] = people.client(server, name)
                stack.push_async_exit(made[at].__aexit__)
            return made[at]

        yield begin


async def put(client: Client, key: bytes, name: str = "a", to: str = "") -> None:
    """Puts a tensor of a page from the server's own store."""
    taken = await client.allocate(1, ttl_s=60)
    where = [to] if to else []
    await client.tensors().put(key, name, described(PAGE), allocation_id=taken.blocks.allocation_id, to=where)


async def refusal(client: Client, key: bytes, **how: object) -> tuple[type[KVGrpcError], Reason]:
    """Returns what a get is refused with."""
    with pytest.raises(KVGrpcError) as caught:
        await client.tensors().get(key, "a", within_s=SHORT_S, **how)  # type: ignore[arg-type]
    return type(caught.value), caught.value.reason


@pytest.mark.parametrize("way", ["sent", "fetched"])
async def test_a_tensor_of_a_tenant_is_unknown_to_another_wherever_it_is(
    servers: tuple[Server, Server], caller: Callers, way: str
) -> None:
    p, d = servers
    key, nothing = os.urandom(16), os.urandom(16)
    await put(caller(p, "red"), key, to=d.address if way == "sent" else "")
    source = {} if way == "sent" else {"source": p.address}
    at_d = caller(d, "blue").tensors()
    if way == "fetched":
        assert await refusal(caller(p, "blue"), key, as_offer=True) == (DeadlineExceeded, Reason.DEADLINE)
    unknown = await refusal(caller(d, "blue"), nothing, **source)
    assert await refusal(caller(d, "blue"), key, **source) == unknown == (DeadlineExceeded, Reason.DEADLINE)
    for released in (await at_d.release(key, **source), await at_d.release(nothing, **source)):  # type: ignore[arg-type]
        assert (released.released_count, released.source_released_count) == (0, 0)
    await caller(d, "blue").cancel(key)
    found = await caller(d, "red").tensors().get(key, "a", **source)  # type: ignore[arg-type]
    assert (found.tensor.name, found.tensor.tenant) == ("a", "red")
    rows = {
        name: len((await caller(d, name).tensors().list()).tensors) for name in ("redviewer", "blueviewer", "house")
    }
    assert rows == {"redviewer": 1, "blueviewer": 0, "house": 1}
    assert (await caller(d, "red").tensors().release(key)).released_count == 1


async def test_a_name_of_a_tenant_is_taken_for_another(servers: tuple[Server, Server], caller: Callers) -> None:
    p, _ = servers
    key = os.urandom(16)
    await put(caller(p, "red"), key)
    with pytest.raises(AlreadyExists):
        await put(caller(p, "blue"), key)


async def test_a_grant_of_a_tensor_is_for_its_tenant(servers: tuple[Server, Server], caller: Callers) -> None:
    p, d = servers
    key = os.urandom(16)
    await put(caller(p, "red"), key)
    offer = await caller(p, "red").tensors().get(key, "a", as_offer=True)
    for name in ("blue", "red"):
        call = caller(d, name).tensors().put(key, "a", offer.tensor.description, grant=offer.grant)
        if name == "blue":
            with pytest.raises(NotFound) as caught:
                await call
            assert caught.value.reason is Reason.LEASE_NOT_FOUND
        else:
            await call
    await caller(d, "red").tensors().get(key, "a")
    assert await refusal(caller(d, "blue"), key) == (DeadlineExceeded, Reason.DEADLINE)


async def test_the_house_states_the_tenant_of_a_tensor_and_a_tenant_states_no_other(
    servers: tuple[Server, Server], caller: Callers, people: People
) -> None:
    p, _ = servers
    key = os.urandom(16)
    async with people.channel(p, "house") as channel, people.channel(p, "blue") as other:
        taken = await caller(p, "house").allocate(1, ttl_s=60)
        request = tensor_pb2.PutTensorRequest(
            tensor=name_of(key), description=described(PAGE), allocation_id=taken.blocks.allocation_id, tenant="red"
        )
        await tensor_pb2_grpc.TensorServiceStub(channel).PutTensor(request)
        await caller(p, "red").tensors().get(key, "a", as_offer=True)
        assert await refusal(caller(p, "blue"), key, as_offer=True) == (DeadlineExceeded, Reason.DEADLINE)
        stated = tensor_pb2.ReleaseTensorsRequest(transfer_key=key, tenant="red")
        with pytest.raises(Exception, match="INVALID_FIELD"):
            await tensor_pb2_grpc.TensorServiceStub(other).ReleaseTensors(stated)


async def test_a_tensor_of_the_house_is_for_whoever_knows_its_key(
    servers: tuple[Server, Server], caller: Callers
) -> None:
    p, _ = servers
    key = os.urandom(16)
    await put(caller(p, "house"), key)
    for name in ("red", "blue"):
        await caller(p, name).tensors().get(key, "a", as_offer=True)
