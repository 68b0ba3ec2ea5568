"""The span of a request's stream at the endpoint picker: one until the picker says where the request goes."""

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from opentelemetry.trace import SpanKind, format_span_id

from kvgrpc.config import Config
from kvgrpc.config_fleet import FleetConfig
from kvgrpc.envoy.v1 import ext_proc_pb2 as ext_proc
from kvgrpc.service.callers import TICKET
from kvgrpc.service.gateway.endpoint_picker import HEADERS_MAX, PROCESS
from kvgrpc.service.rpc.fleet_server import FleetServer
from kvgrpc.service.span_makers import TRACEPARENT
from tests.registry.following import until
from tests.service.kept_spans import PARENT, SAMPLED, UNSAMPLED, Kept, recording

OTHER = f"00-{'12' * 16}-{'34' * 8}-01"
MANY = 100
Headers = Sequence[tuple[str, str]]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    return recording(monkeypatch)


@asynccontextmanager
async def picker(registry: str) -> AsyncIterator[tuple[FleetServer, Any]]:
    """Serves a picker. Yields it, and its method on a connection."""
    fleet = FleetConfig(registry=registry, http="{host}:8000")
    server = FleetServer(Config(listen="127.0.0.1:0", metrics="127.0.0.1:0", pool=None, fleet=fleet), "0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield (
                server,
                channel.stream_stream(
                    f"/{PROCESS}",
                    request_serializer=ext_proc.ProcessingRequest.SerializeToString,
                    response_deserializer=ext_proc.ProcessingResponse.FromString,
                ),
            )
    finally:
        await server.stop()


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[Any]:
    """Yields the method of a picker whose registry has no engine: each request is refused."""
    (registry := tmp_path / "engines.json").write_text('{"engines": []}')
    async with picker(f"file:{registry}") as (_, method):
        yield method


def asked(headers: Headers, mode: int = 0, **more: Any) -> ext_proc.ProcessingRequest:
    rows = [ext_proc.HeaderValue(key=key, raw_value=value.encode()) for key, value in headers]
    return ext_proc.ProcessingRequest(
        request_headers=ext_proc.HttpHeaders(headers=ext_proc.HeaderMap(headers=rows)),
        protocol_config=ext_proc.ProtocolConfiguration(request_body_mode=mode),
        **more,
    )


async def answered(process: Any, *requests: ext_proc.ProcessingRequest, metadata: Headers = ()) -> int:
    """Sends the parts of a request. Returns the number of answers."""
    call = process(metadata=tuple(metadata))
    for request in requests:
        await call.write(request)
    await call.done_writing()
    return len([answer async for answer in call])


async def test_a_sampled_request_has_a_span_that_says_why_it_was_refused(process: Any, kept: Kept) -> None:
    assert await answered(process, asked([("x-secret", "s"), (TRACEPARENT, SAMPLED)])) == 1
    (span,) = kept.spans
    assert (span.name, span.kind) == (PROCESS, SpanKind.SERVER)
    assert span.parent is not None
    assert format_span_id(span.parent.span_id) == PARENT
    assert span.status.description
    assert dict(span.attributes or {}) == {
        "rpc.system.name": "grpc", "rpc.method": PROCESS, "kvgrpc.until": "first reply", "error.type": "503",
    }  # fmt: skip


async def test_a_stream_has_one_span_whatever_it_brings(process: Any, kept: Kept) -> None:
    traced = asked([(TRACEPARENT, SAMPLED)], mode=4)
    piece = ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=b"x"))
    last = ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(end_of_stream=True))
    assert await answered(process, traced, *[piece] * MANY, last) == MANY + 2
    assert [span.name for span in kept.spans] == [PROCESS]
    kept.spans.clear()
    assert await answered(process, traced, traced, last) == 3
    assert [span.name for span in kept.spans] == [PROCESS]


async def test_an_older_envoy_sends_values_as_text(process: Any, kept: Kept) -> None:
    request = asked([])
    request.request_headers.headers.headers.add(key=TRACEPARENT, value=SAMPLED)
    await answered(process, request)
    assert len(kept.spans) == 1


async def test_without_one_sampled_context_there_is_no_span(
    process: Any, kept: Kept, subtests: pytest.Subtests
) -> None:
    wrong: dict[str, ext_proc.ProcessingRequest] = {
        "unsampled": asked([(TRACEPARENT, UNSAMPLED)]),
        "malformed": asked([(TRACEPARENT, "00-\N{SNOWMAN}")]),
        "twice": asked([(TRACEPARENT, SAMPLED), (TRACEPARENT, OTHER)]),
        "none": asked([("x", "y")]),
        "behind too many headers": asked([*[("x", "y")] * HEADERS_MAX, (TRACEPARENT, SAMPLED)]),
        "nobody waits": asked([(TRACEPARENT, SAMPLED)], observability_mode=True),
    }
    for name, request in wrong.items():
        with subtests.test(name):
            await answered(process, request)
            assert kept.spans == []


async def test_envoys_own_context_goes_before_that_of_the_request(process: Any, kept: Kept) -> None:
    await answered(process, asked([(TRACEPARENT, OTHER)]), metadata=((TRACEPARENT, SAMPLED),))
    (span,) = kept.spans
    assert span.parent is not None
    assert format_span_id(span.parent.span_id) == PARENT


async def test_a_stream_that_is_not_let_in_writes_nothing_into_traces(process: Any, kept: Kept) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="NOT_OWNER"):
        await answered(process, asked([(TRACEPARENT, SAMPLED)]), metadata=((TICKET, "00"),))
    assert kept.spans == []


async def test_an_envoy_that_leaves_while_the_registry_is_silent_is_no_failure(kept: Kept) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        async with picker(f"etcd://127.0.0.1:{port}") as (server, process):
            call, used_at = process(), server._reader._used_at
            await call.write(asked([(TRACEPARENT, SAMPLED)]))
            await until(lambda: server._reader._used_at > used_at)
            call.cancel()
            await until(lambda: any(name == PROCESS for name, _ in server._host.calls.seconds))
    (span,) = kept.spans
    assert span.status.is_unset
    assert "error.type" not in (span.attributes or {})
