"""Real leads that find each other by DNS and by Kubernetes: each says itself which engine it is."""

import asyncio
from collections.abc import Callable

from kvgrpc.v1 import admin_pb2, fleet_pb2, handshake_pb2
from tests.registry.apiservers import (
    SLICES,
    RunningApiServer,
    apiserver,
    endpoint,
    needs_apiserver,
    running_apiserver,
    slice_of,
)
from tests.registry.nameserver import name_server
from tests.service.conftest import Start
from tests.service.engines import Engine, wait_until

__all__ = ["apiserver", "running_apiserver"]
HEALTHY, FAILED = fleet_pb2.ENGINE_STATE_HEALTHY, fleet_pb2.ENGINE_STATE_FAILED
NAME = "_kvgrpc._tcp.kv.example"
HERE = ("--listen", "127.0.0.1:0")
"""Flags of a lead at an address that the name localhost has."""
DIALS = {"KVGRPC_DIAL_ALLOW": "localhost,p-0.kv.llm.localhost,127.0.0.0/8", "KVGRPC_FLEET_CHECK_EVERY_S": "0.5"}


def listed(engine: Engine) -> dict[str, fleet_pb2.FleetEngine]:
    return {one.engine_id: one for one in engine.api.fleet.ListEngines(fleet_pb2.ListEnginesRequest()).engines}


def states(engine: Engine) -> dict[str, int]:
    return {name: one.state for name, one in listed(engine).items()}


def port_of(engine: Engine) -> int:
    return int(engine.address.rpartition(":")[2])


async def holds(what: Callable[[], bool]) -> None:
    """Waits in a thread: the name server answers in this one."""
    await asyncio.to_thread(wait_until, what)


def test_a_lead_says_which_engine_it_is_also_without_a_registry(start: Start) -> None:
    more = {"KVGRPC_FLEET_ROLE": "decode", "KVGRPC_FLEET_MODEL": "llama", "KVGRPC_FLEET_TENANT": "t"}
    (lead,) = start(("--engine-id", "a"), **more)
    found = lead.api.handshake.GetCapabilities(handshake_pb2.GetCapabilitiesRequest()).entry
    assert (found.engine_id, found.incarnation, list(found.addresses)) == ("a", lead.incarnation(), [lead.address])
    assert (found.role, found.model_name, found.tenant) == (fleet_pb2.ENGINE_ROLE_DECODE, "llama", "t")
    assert found.model_digest
    assert found.layout_digest
    assert found.life
    assert not found.state


async def test_leads_are_found_by_dns_paired_and_missed(start: Start) -> None:
    async with name_server() as server:
        registry = f"dns+srv://127.0.0.1:{server.port}/{NAME}"
        rows = (
            (*HERE, "--engine-id", "a", "--fleet-role", "prefill"),
            (*HERE, "--engine-id", "b", "--fleet-role", "decode"),
        )
        a, b = await asyncio.to_thread(lambda: start(*rows, KVGRPC_FLEET_REGISTRY=registry, **DIALS))
        server.zone[NAME, "SRV"] = 1, [f"0 0 {port_of(lead)} localhost." for lead in (a, b)]
        await holds(lambda: states(a) == {"a": HEALTHY, "b": HEALTHY})
        pair = await asyncio.to_thread(a.api.fleet.PickPair, fleet_pb2.PickPairRequest())
        assert (pair.prefill.engine.engine_id, pair.decode.engine.engine_id) == ("a", "b")
        b.process.kill()
        await holds(lambda: states(a) == {"a": HEALTHY, "b": FAILED})
        server.silent = True
        await holds(lambda: bool(silence(a)))
        assert (await asyncio.to_thread(states, a)).keys() == {"a", "b"}


def silence(engine: Engine) -> bool:
    return engine.api.fleet.ListEngines(fleet_pb2.ListEnginesRequest()).HasField("registry_silence")


@needs_apiserver
def test_leads_are_found_by_the_slices_of_a_service(start: Start, apiserver: RunningApiServer) -> None:
    """A slice takes no address of loopback, so that the lead is called by the name of its pod."""
    registry = f"kubernetes://?selector=app=kvgrpc&domain=localhost&account={apiserver.account()}"
    (a,) = start((*HERE, "--engine-id", "a"), KVGRPC_FLEET_REGISTRY=registry, **DIALS, **apiserver.environment())
    made = slice_of("s", endpoint("p-0", "10.0.0.1"), annotations={"kvgrpc.dev/role": "prefill"})
    apiserver.call("POST", SLICES, {**made, "ports": [{"name": "grpc", "port": port_of(a)}]})
    wait_until(lambda: states(a) == {"a": HEALTHY})
    found = listed(a)["a"]
    assert list(found.addresses) == [f"p-0.kv.llm.localhost:{port_of(a)}"]
    assert (found.incarnation, found.role, found.host) == (a.incarnation(), fleet_pb2.ENGINE_ROLE_PREFILL, "node-1")
    apiserver.call("DELETE", f"{SLICES}/s")
    wait_until(lambda: not states(a))


@needs_apiserver
def test_leads_publish_themselves_in_leases(start: Start, apiserver: RunningApiServer) -> None:
    registry = f"kubernetes-leases://?account={apiserver.account()}"
    pod = apiserver.environment()
    rows = ("--engine-id", "a"), ("--engine-id", "b")
    a, b = start(*rows, KVGRPC_FLEET_REGISTRY=registry, KVGRPC_FLEET_ENTRY_TTL_S="4", **DIALS, **pod)
    wait_until(lambda: states(a) == {"a": HEALTHY, "b": HEALTHY})
    assert a.api.admin.GetStatus(admin_pb2.GetStatusRequest()).publication.published
    b.process.end()
    wait_until(lambda: states(a) == {"a": HEALTHY})
