"""Standard services that every gRPC tool expects of a server: health, reflection, channelz."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_channelz.v1 import channelz_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tests.service.conftest import Start
from tests.service.engines import Engine
from tests.service.footprint import resident_bytes
from tests.service.services import NAMES

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
STANDARD = [
    "grpc.health.v1.Health",
    "grpc.channelz.v1.Channelz",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
]
BOTH_VERSIONS = pytest.mark.parametrize("version", ["v1", "v1alpha"])


def reflect(engine: Engine, version: str, request: reflection_pb2.ServerReflectionRequest) -> bytes:
    """Asks one question of the reflection service of that version, by its full name."""
    stream = engine.api.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    replies: Iterator[reflection_pb2.ServerReflectionResponse] = stream(iter([request]), timeout=10)
    (reply,) = replies
    return bytes(reply.SerializeToString())


@BOTH_VERSIONS
def test_reflection_lists_every_service(source: Engine, version: str) -> None:
    found = reflect(source, version, reflection_pb2.ServerReflectionRequest(list_services=""))
    reply = reflection_pb2.ServerReflectionResponse.FromString(found)
    assert {service.name for service in reply.list_services_response.service} == {*NAMES, *STANDARD}


@BOTH_VERSIONS
@pytest.mark.parametrize("service", NAMES)
def test_reflection_describes_every_service_down_to_its_last_import(source: Engine, version: str, service: str) -> None:
    wanted, known = [reflection_pb2.ServerReflectionRequest(file_containing_symbol=service)], {}
    while wanted:
        found = reflect(source, version, wanted.pop())
        reply = reflection_pb2.ServerReflectionResponse.FromString(found)
        assert reply.HasField("file_descriptor_response"), reply
        for data in reply.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            known[file.name] = file
        missing = {name for file in known.values() for name in file.dependency} - known.keys()
        wanted += [reflection_pb2.ServerReflectionRequest(file_by_filename=name) for name in missing]
    methods = [m for f in known.values() for s in f.service for m in s.method if service.endswith(f"{s.name}")]
    assert methods


@BOTH_VERSIONS
def test_reflection_tells_the_comments_which_are_the_contract(source: Engine, version: str) -> None:
    wanted = reflection_pb2.ServerReflectionRequest(file_containing_symbol="kvgrpc.v1.HandoffService")
    reply = reflection_pb2.ServerReflectionResponse.FromString(reflect(source, version, wanted))
    files = map(descriptor_pb2.FileDescriptorProto.FromString, reply.file_descriptor_response.file_descriptor_proto)
    found = {file.name: file for file in files}
    for name in ("kvgrpc/v1/handoff.proto", "kvgrpc/v1/common.proto"):
        for part, rows in ((4, found[name].message_type), (6, found[name].service)):
            told = {tuple(at.path) for at in found[name].source_code_info.location if at.leading_comments}
            assert {(part, i) for i in range(len(rows))} <= told, name
    said = "".join(at.leading_comments for at in found["kvgrpc/v1/handoff.proto"].source_code_info.location)
    assert "CONTENT_MISMATCH" in said


@BOTH_VERSIONS
@pytest.mark.parametrize(
    ("symbol", "found"),
    [
        ("kvgrpc.v1.HandoffService.PullBlocks", True),
        ("kvgrpc.v1.Transfer", True),
        ("kvgrpc.v1.Transfer.state", True),
        ("kvgrpc.v1.TRANSFER_STATE_FAILED", True),
        ("kvgrpc.v1.HandoffService.NoSuchCall", False),
        ("kvgrpc.v1.NoSuchService.PullBlocks", False),
        ("", False),
    ],
)
def test_reflection_finds_methods_fields_and_values(source: Engine, version: str, symbol: str, found: bool) -> None:
    answer = reflect(source, version, reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol))
    reply = reflection_pb2.ServerReflectionResponse.FromString(answer)
    assert reply.HasField("file_descriptor_response") is found
    assert reply.HasField("error_response") is not found


def test_every_service_is_healthy_by_its_own_name(source: Engine) -> None:
    for service in ["", *NAMES]:
        reply = source.api.health.Check(health_pb2.HealthCheckRequest(service=service))
        assert reply.status == SERVING, service


def test_the_health_of_all_services_is_listed(source: Engine) -> None:
    reply = source.api.health.List(health_pb2.HealthListRequest())
    assert set(NAMES) < reply.statuses.keys()
    assert {row.status for row in reply.statuses.values()} == {SERVING}


def test_the_health_of_an_unknown_service_is_not_found(source: Engine) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        source.api.health.Check(health_pb2.HealthCheckRequest(service="kvgrpc.v1.NoSuchService"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_watching_the_health_tells_when_the_server_leaves(start: Start) -> None:
    (engine,) = start(("--drain-s", "60"))
    watch = engine.api.health.Watch(health_pb2.HealthCheckRequest(service="kvgrpc.v1.HandoffService"), timeout=20)
    assert next(watch).status == SERVING
    handed = engine.hand_over([1, 2, 3])
    engine.process.popen.terminate()
    assert next(watch).status == NOT_SERVING
    others = {service for service in ["", *NAMES] if service != "kvgrpc.v1.HandoffService"}
    for service in others:  # transfers that go on need them
        assert engine.api.health.Check(health_pb2.HealthCheckRequest(service=service)).status == SERVING, service
    engine.cancel(handed.transfer.transfer_id)  # the server ends with the last lease
    assert engine.process.wait_exit() == 0


def test_a_server_without_a_pool_is_not_healthy_and_says_why(start: Start) -> None:
    (engine,) = start(("--no-pool",))
    for service in ["", "kvgrpc.v1.HandoffService"]:
        assert engine.api.health.Check(health_pb2.HealthCheckRequest(service=service)).status == NOT_SERVING


def test_channelz_counts_the_calls_of_the_server(source: Engine) -> None:
    def started() -> int:
        (server,) = source.api.channelz.GetServers(channelz_pb2.GetServersRequest()).server
        calls: int = server.data.calls_started
        return calls

    before = started()
    source.check_alive()
    assert started() >= before + 2


@pytest.mark.parametrize("path", ["grpc.health.v1.Health/Check", "grpc.channelz.v1.Channelz/GetServer"])
def test_what_is_no_message_fails_its_call_and_is_no_defect_in_the_log(source: Engine, path: str) -> None:
    with pytest.raises(grpc.RpcError):
        source.api.plain.unary_unary(f"/{path}", request_serializer=bytes)(b"\xff\xff\xff", timeout=10)
    source.process.check_log()


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_what_is_no_message_ends_its_reflection_and_is_no_defect_in_the_log(source: Engine, version: str) -> None:
    path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    stream: Any = source.api.plain.stream_stream(path, request_serializer=bytes)
    with pytest.raises(grpc.RpcError):
        list(stream(iter([b"\xff\xff\xff"]), timeout=10))
    source.process.check_log()


def test_refused_health_checks_keep_no_memory_however_long_they_were(source: Engine) -> None:
    request = health_pb2.HealthCheckRequest(service="x" * 2_000_000)

    def refuse() -> None:
        with pytest.raises(grpc.RpcError) as caught:
            source.api.health.Check(request, timeout=60)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    for _ in range(10):  # each later request reuses the memory of such a request
        refuse()
    before = resident_bytes(source.process.pid)
    for _ in range(40):
        refuse()
    assert resident_bytes(source.process.pid) - before < 20_000_000
