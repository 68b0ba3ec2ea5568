"""Engine ids belong to the identity that brought them, until an operator says otherwise."""

from pathlib import Path

import pytest

from kvgrpc.config_security import TlsConfig
from kvgrpc.errors import PermissionDenied, Reason
from kvgrpc.service.identity import gate as module
from kvgrpc.service.identity.gate import CALLER, OF_IDENTITY_MAX, EngineIds, KnownCaller
from kvgrpc.service.identity.roles import EVERY
from kvgrpc.v1 import admin_pb2, admin_pb2_grpc
from tests.identity.servers import People, serving, spiffe


@pytest.fixture
def people(tmp_path: Path) -> People:
    people = People(tmp_path)
    people.give(p="peer", d="peer", thief="peer", router="router", operator="operator viewer")
    return people


async def test_an_engine_id_of_another_identity_is_refused_until_an_operator_forgets_it(people: People) -> None:
    async with serving(people, "p") as p:
        async with serving(people, "d") as d, people.client(d, "router") as at_d:
            await at_d.connect_peer(p.address)
        of_thief = TlsConfig(dir=str(people.files("thief").cert.parent))
        async with serving(people, "d", tls=of_thief) as thief, people.client(thief, "router") as at_thief:
            with pytest.raises(PermissionDenied) as refused:
                await at_thief.connect_peer(p.address)
            assert refused.value.reason is Reason.NOT_OWNER
            async with people.channel(p, "operator") as channel:
                stub = admin_pb2_grpc.AdminServiceStub(channel)
                request = admin_pb2.ForgetEngineRequest(engine_id="d", message="it moved")
                assert (await stub.ForgetEngine(request)).identity == spiffe("d")
                assert not (await stub.ForgetEngine(request)).identity
                (second, first) = (await stub.ListAuditRecords(admin_pb2.ListAuditRecordsRequest())).records
                assert (first.method, first.target, first.message) == ("ForgetEngine", "engine_id=d", "it moved")
                assert second.number == 2
            await at_thief.connect_peer(p.address)


async def test_an_operator_with_a_tenant_forgets_no_engine_of_another_tenant(people: People) -> None:
    people.give(p="peer", d="peer@red", red="operator@red", blue="operator@blue", router="router")
    async with serving(people, "p") as p, serving(people, "d") as d, people.client(d, "router") as at_d:
        await at_d.connect_peer(p.address)
        said = []
        for name in ("blue", "red"):
            async with people.channel(p, name) as channel:
                stub = admin_pb2_grpc.AdminServiceStub(channel)
                said.append((await stub.ForgetEngine(admin_pb2.ForgetEngineRequest(engine_id="d"))).identity)
        assert said == ["", spiffe("d")]


async def test_the_same_identity_brings_its_engine_id_again(people: People) -> None:
    async with serving(people, "p") as p:
        for _ in range(2):
            async with serving(people, "d") as d, people.client(d, "router") as at_d:
                await at_d.connect_peer(p.address)


def calling(name: str) -> None:
    CALLER.set(KnownCaller(name, EVERY, "", name))


def test_an_identity_owns_so_many_ids_and_takes_none_of_others() -> None:
    ids = EngineIds()
    calling("a")
    ids.claim("first of a")
    calling("b")
    for number in range(OF_IDENTITY_MAX + 1):
        ids.claim(f"{number}")
    with pytest.raises(PermissionDenied):
        ids.claim("first of a")
    calling("c")
    ids.claim("0")
    with pytest.raises(PermissionDenied):
        ids.check("1")


def test_callers_without_a_name_own_nothing_and_take_nothing() -> None:
    ids = EngineIds()
    calling("anonymous")
    ids.claim("x")
    calling("a")
    ids.claim("x")
    calling("anonymous")
    with pytest.raises(PermissionDenied):
        ids.claim("x")


def test_ids_are_bounded_in_all_and_whoever_has_most_loses_its_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDS_MAX", 4)
    ids = EngineIds()
    for name, engine_id in (("a", "1"), ("b", "2"), ("b", "3"), ("c", "4"), ("d", "5")):
        calling(name)
        ids.claim(engine_id)
    calling("nobody")
    ids.check("2")
    for taken in ("1", "3", "4"):
        with pytest.raises(PermissionDenied):
            ids.check(taken)
