"""Roles over real sockets: who may call what, on every carrier."""

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.descriptor_pool import Default
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvgrpc.client import move
from kvgrpc.config import Config
from kvgrpc.config_security import IdentityConfig
from kvgrpc.errors import PermissionDenied, Reason, Unauthenticated
from kvgrpc.peer.v1 import peer_pb2, peer_pb2_grpc
from kvgrpc.server import Server
from kvgrpc.service.grpc_status import from_call_status, from_rpc_error
from kvgrpc.service.identity.gate import Gate, check_local
from kvgrpc.service.identity.roles import ANYONE, LOCAL, METHODS, WITHIN, Role
from kvgrpc.session.v1 import rank_pb2, session_pb2
from kvgrpc.v1 import calls_pb2, lease_pb2, lease_pb2_grpc, scheduler_pb2
from tests.identity.servers import SMALL, People, serving

REFLECTION = "grpc.reflection.v1.ServerReflection"
ALPHA = "grpc.reflection.v1alpha.ServerReflection"
TIMEOUT_S = 20.0


@pytest.fixture
def people(tmp_path: Path) -> People:
    return People(tmp_path)


@pytest.fixture
async def server(people: People) -> AsyncIterator[Server]:
    people.give(**{role.value: role.value for role in Role})
    async with serving(people, "e") as server:
        yield server


async def services(channel: grpc.aio.Channel) -> list[ServiceDescriptor]:
    """Returns all services of a server, as it says by reflection."""

    async def asking() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    async for reply in stub.ServerReflectionInfo(asking(), timeout=TIMEOUT_S):
        names = [row.name for row in reply.list_services_response.service]
        # The two versions of reflection have one descriptor.
        return [Default().FindServiceByName(ALPHA if name == REFLECTION else name) for name in names]
    raise AssertionError("no answer")


def methods(found: list[ServiceDescriptor]) -> Iterator[tuple[str, Any]]:
    for service in found:
        for method in service.methods:
            yield f"{service.full_name}/{method.name}", method


async def refusal(channel: grpc.aio.Channel, name: str, method: Any) -> Reason | None:
    """Calls a method with an empty request. Returns the reason if the gate refuses it."""
    kind = ("stream" if method.client_streaming else "unary", "stream" if method.server_streaming else "unary")
    make = getattr(channel, "_".join(kind))(f"/{name}")
    # A stream is refused before its first message, and a message after that would end in an error of its own.
    call = make(timeout=TIMEOUT_S) if method.client_streaming else make(b"", timeout=TIMEOUT_S)
    try:
        if method.server_streaming:
            await call.read()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        found = from_rpc_error(error)
        return found.reason if found.reason in (Reason.ROLE_MISSING, Reason.NOT_AUTHENTICATED) else None
    finally:
        call.cancel()
    return None


def state_of(server: Server) -> tuple[Any, ...]:
    """Returns what no refused call may change."""
    state = server._lead.runner.node.state
    return (
        state.life.incarnation, state.transfers.seq, state.life.draining, state.ledger.total, len(state.send.leases),
        state.pool.allocator.allocated(0), len(state.pool.pins.spaces), dict(state.ledger.by_kind),
    )  # fmt: skip


async def test_every_method_of_every_service_has_a_row_and_no_row_is_of_none(people: People, server: Server) -> None:
    async with people.channel(server, "operator") as channel:
        found = {name for name, _ in methods(await services(channel))}
    frames = {
        f"{message.DESCRIPTOR.full_name}/{field.name}"
        for message, oneof in ((peer_pb2.PeerCall, "call"), (session_pb2.Call, "request"))
        for field in message.DESCRIPTOR.oneofs_by_name[oneof].fields
    }
    attaching = {f"{session_pb2.ClientFrame.DESCRIPTOR.full_name}/{name}" for name in ("attach", "attach_rank")}
    both = {f"{REFLECTION}/ServerReflectionInfo", f"{ALPHA}/ServerReflectionInfo"}
    picker = {"envoy.service.ext_proc.v3.ExternalProcessor/Process"}  # of `kvgrpc fleet`, and of no lead
    assert found | frames | attaching | both | picker == METHODS.keys()


@pytest.mark.parametrize("role", list(Role))
async def test_a_role_reaches_its_methods_and_is_refused_at_all_others(
    people: People, server: Server, role: Role
) -> None:
    before, wrong = state_of(server), []
    async with people.channel(server, role.value) as channel, people.channel(server, "operator") as looks:
        for name, method in methods(await services(looks)):
            allowed = METHODS[name] is ANYONE or role in METHODS[name]
            if allowed and (role is not Role.VIEWER or method.client_streaming):
                continue  # what a role may do, other tests do
            if await refusal(channel, name, method) is not (None if allowed else Reason.ROLE_MISSING):
                wrong.append(name)
    assert wrong == []
    assert state_of(server) == before


async def test_a_call_over_a_stream_of_calls_has_the_roles_of_the_streams_caller(
    people: People, server: Server
) -> None:
    before, unary = state_of(server), [name for name in METHODS if name.startswith("kvgrpc.v1.")]
    refused, reached = set[str](), set[str]()
    async with people.channel(server, "viewer") as channel:
        pool = Default()
        wanted = [
            name
            for name in unary
            if not (method := pool.FindMethodByName(name.replace("/", "."))).client_streaming
            and not method.server_streaming
        ]
        stream = channel.stream_stream(
            "/kvgrpc.v1.CallService/StreamCalls",
            calls_pb2.StreamCallsRequest.SerializeToString,
            calls_pb2.StreamCallsResponse.FromString,
        )(timeout=TIMEOUT_S)
        rows = [calls_pb2.UnaryCall(call_id=number, method=name) for number, name in enumerate(wanted, 1)]
        await stream.write(calls_pb2.StreamCallsRequest(calls=rows))
        while len(refused) + len(reached) < len(wanted):
            answers: Any = await stream.read()
            for answer in answers.answers:
                denied = answer.HasField("error") and from_call_status(answer.error).reason is Reason.ROLE_MISSING
                (refused if denied else reached).add(wanted[answer.call_id - 1])
        stream.cancel()
    assert reached == {name for name in wanted if Role.VIEWER in METHODS[name]}
    assert state_of(server) == before


async def test_a_refusal_names_the_roles_is_counted_and_is_logged_once_for_each_caller(
    people: People, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async with people.client(server, "viewer") as client, people.client(server, "nobody") as nobody:
        for _ in range(3):
            with pytest.raises(PermissionDenied) as refused:
                await client.allocate(1)
            assert refused.value.reason is Reason.ROLE_MISSING
            assert refused.value.metadata["roles"] == "engine, router"
        with pytest.raises(PermissionDenied, match="no role"):
            await nobody.allocate(1)
    assert server._lead.gate.denied[Reason.ROLE_MISSING] == 4
    assert caplog.text.count("refused:") == 2


async def test_roles_change_with_the_file_and_a_broken_file_changes_nothing(people: People, server: Server) -> None:
    async with people.client(server, "viewer") as client:
        with pytest.raises(PermissionDenied):
            await client.allocate(1)
        people.give(viewer="router")
        assert server._lead.gate.look()
        await client.allocate(1)
        people.roles.write_text("[[callers")
        assert not server._lead.gate.look()
        await client.allocate(1)
        people.give()
        assert server._lead.gate.look()
        with pytest.raises(PermissionDenied):
            await client.allocate(1)


async def test_a_lead_that_loses_its_role_is_refused_on_the_stream_that_it_has(people: People) -> None:
    people.give(d="peer")
    async with serving(people, "p") as p, people.channel(p, "d") as channel:
        stub: Any = peer_pb2_grpc.PeerServiceStub(channel)
        stream = stub.Converse(timeout=60)
        heard = []
        for call_id in (1, 2):
            call = peer_pb2.PeerCall(call_id=call_id, close_access=peer_pb2.CloseAccessRequest())
            await stream.write(peer_pb2.ConverseRequest(caller=peer_pb2.Caller(engine_id="d"), calls=[call]))
            (answer,) = (await stream.read()).answers
            heard.append(from_call_status(answer.error).reason)
            people.give(d="viewer")
            p._lead.gate.look()
        assert heard == [Reason.NO_HANDSHAKE, Reason.ROLE_MISSING]


async def test_a_caller_that_loses_its_role_renews_nothing_on_the_stream_that_it_has(
    people: People, server: Server
) -> None:
    people.give(viewer="router")
    server._lead.gate.look()
    async with people.channel(server, "viewer") as channel:
        stream: Any = lease_pb2_grpc.LeaseServiceStub(channel).KeepAlive(timeout=60)
        await stream.write(lease_pb2.KeepAliveRequest(sequence=1))
        assert (await stream.read()).sequence == 1
        people.give(viewer="viewer")
        server._lead.gate.look()
        await stream.write(lease_pb2.KeepAliveRequest(sequence=2))
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stream.read()
        assert from_rpc_error(ended.value).reason is Reason.ROLE_MISSING


async def test_leads_with_the_role_of_a_peer_exchange_blocks_for_a_router(people: People) -> None:
    people.give(p="peer", d="peer", router="router")
    async with (
        serving(people, "p") as p, serving(people, "d") as d,
        people.client(p, "router") as at_p, people.client(d, "router") as at_d,
    ):  # fmt: skip
        await move(at_p, at_d, await at_p.allocate(2, ttl_s=60), list(range(32)))


async def test_a_lead_without_the_role_of_a_peer_is_not_met(people: People) -> None:
    people.give(p="viewer", d="peer", router="router")
    async with (
        serving(people, "p") as p, serving(people, "d") as d,
        people.client(p, "router") as at_p, people.client(d, "router") as at_d,
    ):  # fmt: skip
        with pytest.raises(PermissionDenied):
            await at_p.connect_peer(d.address)
        await at_d.connect_peer(p.address)


async def test_without_a_file_everyone_with_a_certificate_has_all_roles(people: People) -> None:
    async with serving(people, "e", roles=False) as server, people.client(server, "anybody") as client:
        await client.allocate(1)


async def test_a_plain_server_with_a_file_gives_anonymous_callers_the_roles_of_their_row(people: People) -> None:
    people.roles.write_text('[[callers]]\nname = "anonymous"\nroles = ["viewer"]\n')
    config = Config(listen="127.0.0.1:0", pool=SMALL, data_paths=("shm",), identity=IdentityConfig(str(people.roles)))
    server = Server(config)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            found = dict(methods(await services(channel)))
            allocate, health = "kvgrpc.v1.PoolService/AllocateBlocks", "grpc.health.v1.Health/Check"
            assert await refusal(channel, allocate, found[allocate]) is Reason.NOT_AUTHENTICATED
            assert await refusal(channel, health, found[health]) is None
    finally:
        await server.stop()


def test_every_kind_of_frame_from_outside_has_a_row_or_a_reason_why_it_has_none() -> None:
    carriers = (session_pb2.ClientFrame, session_pb2.Call, rank_pb2.RankReport, peer_pb2.PeerCall)
    kinds = {
        f"{message.DESCRIPTOR.full_name}/{field.name}"
        for message in (*carriers, scheduler_pb2.ScheduleCall)
        for oneof in message.DESCRIPTOR.oneofs
        for field in oneof.fields
    }
    assert {
        kind for kind in kinds - METHODS.keys() if kind not in WITHIN and kind.partition("/")[0] not in WITHIN
    } == set()
    named = kinds | {kind.partition("/")[0] for kind in kinds}
    assert named >= WITHIN.keys()
    assert METHODS.keys().isdisjoint(WITHIN)


def test_a_call_within_a_step_needs_no_other_role_than_the_step() -> None:
    service = "kvgrpc.v1.SchedulerService"
    methods = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].methods
    assert {METHODS[f"{service}/{method.name}"] for method in methods} == {METHODS[f"{service}/Schedule"]}


def test_processes_at_the_session_socket_have_the_roles_of_engine_and_rank() -> None:
    for method, roles in METHODS.items():
        if roles.isdisjoint(LOCAL):
            with pytest.raises(PermissionDenied):
                check_local(method)
        elif method.startswith("kvgrpc.session."):
            check_local(method)


def test_the_gate_makes_few_calls_for_a_known_caller(people: People) -> None:
    """Calls of Python are counted, which do not depend on the machine."""
    people.give(e="router")
    found = {"peer_spiffe_id": [b"spiffe://test/e"]}
    context = SimpleNamespace(invocation_metadata=lambda: (("user-agent", "x"),), auth_context=lambda: found)
    gate = Gate(Config(identity=IdentityConfig(str(people.roles))))
    gate._tls = True
    method = "kvgrpc.v1.PoolService/AllocateBlocks"
    gate.admit(context, method, b"")
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        gate.admit(context, method, b"")
    finally:
        sys.setprofile(None)
    assert len(calls) <= 8, calls


def test_a_caller_without_a_name_is_told_to_show_one(people: People) -> None:
    gate = Gate(Config(identity=IdentityConfig(str(people.roles))))
    context = SimpleNamespace(invocation_metadata=lambda: ())
    with pytest.raises(Unauthenticated):
        gate.admit(context, "kvgrpc.peer.v1.RankService/ConnectRank", b"")
