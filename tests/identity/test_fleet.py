"""`kvgrpc fleet` under TLS: certificates decide who answers at an address, and tenants hear of their own engines."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from cryptography import x509

from kvgrpc.client import Client, FleetEngines
from kvgrpc.config import Config
from kvgrpc.config_fleet import FleetConfig
from kvgrpc.config_security import IdentityConfig, TlsConfig
from kvgrpc.errors import InvalidRequest, PermissionDenied
from kvgrpc.fleet.directory import Directory, HealthCheck
from kvgrpc.service.fleet.lead_checks import LeadChecks
from kvgrpc.service.rpc.fleet_server import FleetServer
from kvgrpc.v1 import fleet_pb2
from tests.identity.servers import CA, People, serving
from tests.tls.authority import Authority

HEALTHY, FAILED = fleet_pb2.ENGINE_STATE_HEALTHY, fleet_pb2.ENGINE_STATE_FAILED


def write(people: People, rows: list[dict[str, object]]) -> Path:
    """Replaces the entries as a whole."""
    path = people.folder / "engines.json"
    (made := path.with_suffix(".new")).write_text(json.dumps({"engines": rows}))
    return made.replace(path)


@asynccontextmanager
async def reading(
    people: People, rows: list[dict[str, object]], certificate_name: str = ""
) -> AsyncIterator[FleetServer]:
    """Serves a fleet of the entries."""
    path = write(people, rows)
    config = Config(
        listen="127.0.0.1:0", pool=None, tls=TlsConfig(dir=str(people.files("fleet").cert.parent)),
        identity=IdentityConfig(roles=str(people.roles)),
        fleet=FleetConfig(registry=f"file:{path}", check_every_s=0.5, certificate_name=certificate_name),
    )  # fmt: skip
    server = FleetServer(config, "0")
    await server.start()
    server.address = server.address.replace("127.0.0.1", "localhost")
    try:
        yield server
    finally:
        await server.stop()


async def until(client: Client, wanted: dict[str, int]) -> None:
    """Waits until the engines that a caller hears of are in these states."""
    async with asyncio.timeout(30):
        async for event in client.fleet().watch():
            assert isinstance(event, FleetEngines)
            if {one.engine_id: one.state for one in event.engines.values()} == wanted:
                return


async def test_an_engine_is_healthy_only_behind_a_certificate_for_its_address(tmp_path: Path) -> None:
    people = People(tmp_path)
    people.give(fleet="viewer", router="router")
    foreign = Authority().issue(tmp_path / "foreign", (x509.DNSName("localhost"),))
    async with (
        serving(people, "p") as lead,
        serving(people, "f", roles=False, tls=TlsConfig(dir=str(foreign.cert.parent))) as other,
    ):
        rows: list[dict[str, object]] = [
            {"engine_id": "p", "addresses": [lead.address]},
            {"engine_id": "f", "addresses": [other.address]},
            {"engine_id": "unnamed", "addresses": [lead.address.replace("localhost", "127.0.0.1")]},
        ]
        async with reading(people, rows) as server, people.client(server, "router") as client:
            await until(client, {"p": HEALTHY, "f": FAILED, "unnamed": FAILED})


async def test_an_engine_id_belongs_to_the_certificate_that_has_its_name(tmp_path: Path) -> None:
    people = People(tmp_path)
    people.give(fleet="viewer", router="router")
    local = x509.DNSName("localhost")
    files = {name: CA.issue(tmp_path / f"{name}.d", (local, x509.DNSName(f"{name}.kv.example"))) for name in "pq"}
    shown = {name: TlsConfig(dir=str(made.cert.parent)) for name, made in files.items()}
    async with (
        serving(people, "p", tls=shown["p"]) as own,
        serving(people, "p", tls=shown["q"]) as impostor,
        serving(people, "*", tls=shown["q"]) as star,
    ):
        rows: list[dict[str, object]] = [
            {"engine_id": "p", "addresses": [impostor.address]},
            {"engine_id": "*", "addresses": [star.address]},
        ]
        async with (
            reading(people, rows, "{engine_id}.kv.example") as server,
            people.client(server, "router") as client,
        ):
            await until(client, {"p": FAILED, "*": FAILED})
            write(people, [{"engine_id": "p", "addresses": [own.address]}])
            await until(client, {"p": HEALTHY})


async def test_an_entry_that_changes_its_engine_id_has_no_connection_of_the_old_one(tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []

    def connect(address: str, name: str) -> grpc.aio.Channel:
        asked.append((address, name))
        return grpc.aio.insecure_channel(address)

    checks, directory = LeadChecks(connect, lambda _: True, "{engine_id}.kv"), Directory()
    people = People(tmp_path)
    people.give()
    async with serving(people, "p", tls=TlsConfig(), identity=IdentityConfig()) as lead:
        for engine_id in ("p", "q", "p"):
            await checks.ask(directory, HealthCheck("k", engine_id, 0, lead.address))
        assert asked == [(lead.address, "p.kv"), (lead.address, "q.kv")]
    await checks.close()


def test_a_name_of_certificates_needs_tls() -> None:
    with pytest.raises(InvalidRequest, match="needs TLS"):
        Config(pool=None, fleet=FleetConfig(registry="file:x", certificate_name="{engine_id}.kv"))


async def test_a_tenant_hears_of_its_engines_and_of_those_of_all(tmp_path: Path) -> None:
    people = People(tmp_path)
    people.give(fleet="viewer", red="router@red", blue="router@blue", all="router", looks="viewer")
    async with serving(people, "a") as one, serving(people, "b") as two, serving(people, "c") as three:
        rows: list[dict[str, object]] = [
            {"engine_id": "a", "addresses": [one.address], "role": "prefill", "tenant": "red"},
            {"engine_id": "b", "addresses": [two.address], "role": "decode"},
            {"engine_id": "c", "addresses": [three.address], "role": "prefill", "tenant": "blue"},
        ]
        async with reading(people, rows) as server:
            async with people.client(server, "all") as client:
                await until(client, dict.fromkeys("abc", HEALTHY))
            async with people.client(server, "red") as red:
                await until(red, dict.fromkeys("ab", HEALTHY))
                picked = await red.fleet().pick_pair(tenant="blue")
                assert picked.prefill.engine.engine_id == "a", "whatever tenant it states"
                assert sum(row.engine_count for row in picked.state_counts) == 2
                none = await red.fleet().pick_pair(exclude=["a"])
                assert "blue" not in none.reason
                assert "2 healthy" in none.reason
            async with people.client(server, "looks") as looks:
                await until(looks, dict.fromkeys("abc", HEALTHY))
                with pytest.raises(PermissionDenied):
                    await looks.fleet().pick_pair()
            async with people.client(server, "nobody") as nobody:
                with pytest.raises(PermissionDenied):
                    await nobody.fleet().engines()
