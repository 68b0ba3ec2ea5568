"""Metrics of real leads, read over HTTP as Prometheus reads them."""

import asyncio
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from kvgrpc.client import connect
from kvgrpc.config import Config, PoolConfig
from kvgrpc.config_security import TlsConfig
from kvgrpc.errors import Exhausted, KVGrpcError
from kvgrpc.server import Server
from kvgrpc.service.address_in_use import AddressInUse
from kvgrpc.service.call_queue import BYTES_MAX
from kvgrpc.service.metrics import endpoint
from kvgrpc.service.metrics.endpoint import CONNECTIONS_MAX
from kvgrpc.service.metrics.families import FAMILIES, MetricKind
from kvgrpc.v1 import lease_pb2, lease_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from tests.identity.servers import People
from tests.service.engines import wait_until

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
TRACE = "ab" * 16
POOL = PoolConfig(layers=2, kv_heads=1, head_dim=8, blocks=64)
Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


@asynccontextmanager
async def serving(engine_id: str, **settings: Any) -> AsyncIterator[Server]:
    places = dict.fromkeys(("listen", "metrics"), "127.0.0.1:0")
    given: dict[str, Any] = {**places, "engine_id": engine_id, "pool": POOL, "data_paths": ("shm",)}
    server = Server(Config(**(given | settings)))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def read(server: Server, path: str, accept: str = "") -> tuple[int, str]:
    """Returns status and text of an answer."""
    request = urllib.request.Request(f"http://{server.metrics_address}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def get(server: Server, path: str, accept: str = "") -> tuple[int, str]:
    """Does the same as `read`, in a thread."""
    return await asyncio.to_thread(read, server, path, accept)


async def scrape(server: Server) -> Values:
    _, text = await get(server, "/metrics")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse_text(text)
        for sample in family.samples
    }


def at(values: Values, name: str, **labels: str) -> float:
    return values[name, frozenset(labels.items())]


async def pulled(source: Server, destination: Server, tokens: list[int]) -> None:
    """Moves the KV of a prompt, and frees everything."""
    async with connect(source.address) as p, connect(destination.address) as d:
        made, taken = await p.allocate(2), await d.allocate(2)
        handed = await p.finished_blocks(made, tokens)
        await p.free(made)
        await d.pull(handed.grant, tokens, blocks=taken)
        await d.free(taken)


@contextmanager
def traced() -> Iterator[None]:
    """Makes calls inside part of a trace that somebody else records."""
    context = SpanContext(int(TRACE, 16), 0x1234, is_remote=False, trace_flags=TraceFlags(1), trace_state=TraceState())
    with trace.use_span(NonRecordingSpan(context)):
        yield


async def test_what_moved_is_counted_at_both_ends() -> None:
    async with serving("P") as source, serving("D") as destination:
        await pulled(source, destination, list(range(32)))
        p, d = await scrape(source), await scrape(destination)
        assert at(p, "kvgrpc_transfers_total", direction="send", mode="pull", outcome="succeeded") == 1
        assert at(d, "kvgrpc_transfers_total", direction="receive", mode="pull", outcome="succeeded") == 1
        assert at(d, "kvgrpc_received_bytes_total") > 0
        assert at(d, "kvgrpc_transfer_bytes_count", data_path="shm") == 1
        assert at(d, "kvgrpc_transfer_phase_seconds_count", direction="receive", phase="wire") == 1
        assert at(p, "kvgrpc_lease_ends_total", state="done") == 1
        assert at(p, "kvgrpc_peers", state="connected") == 1
        blocks = [at(p, "kvgrpc_blocks", space="0", state=state) for state in ("free", "allocated", "pinned")]
        assert blocks == [POOL.blocks, 0, 0]


async def test_a_transfer_that_fails_is_counted_with_its_reason() -> None:
    async with serving("P") as source, serving("D") as destination:
        async with connect(source.address) as p, connect(destination.address) as d:
            made, taken = await p.allocate(2), await d.allocate(2)
            handed = await p.finished_blocks(made, list(range(32)))
            await d.pull(handed.grant, list(range(1, 33)), blocks=taken)
        values = await scrape(destination)
        assert at(values, "kvgrpc_transfer_failures_total", direction="receive", reason="CONTENT_MISMATCH") == 1


async def test_calls_are_counted_by_method_and_code_whatever_carries_them() -> None:
    async with serving("P") as source, serving("D") as destination:
        async with connect(source.address) as client:
            await client.pool_status()
            with pytest.raises(KVGrpcError):
                await client.get_lease("nope")
        await pulled(source, destination, list(range(32)))
        values = await scrape(source)
        name = "rpc_server_call_duration_seconds_count"

        def count(method: str, code: str) -> float:
            return at(values, name, rpc_system_name="grpc", rpc_method=method, rpc_response_status_code=code)

        assert count("kvgrpc.v1.PoolService/GetPoolStatus", "OK") == 1
        assert count("kvgrpc.v1.LeaseService/GetLease", "NOT_FOUND") == 1
        assert count("kvgrpc.peer.v1.PeerCall/open_access", "OK") == 1


async def test_calls_of_a_schedulers_step_are_counted_one_by_one() -> None:
    async with serving("P") as source, connect(source.address) as client:
        incarnation = (await client.status()).header.incarnation
        asked = scheduler_pb2.ScheduleRequest(
            incarnation=incarnation,
            calls=[
                scheduler_pb2.ScheduleCall(match_tokens=scheduler_pb2.MatchTokensRequest(request_id="nobody's")),
                scheduler_pb2.ScheduleCall(match_tokens=scheduler_pb2.MatchTokensRequest()),
            ],
        )
        stream: Any = scheduler_pb2_grpc.SchedulerServiceStub(client.channel).Schedule(timeout=20)
        await stream.write(asked)
        answers = (await stream.read()).answers
        values = await scrape(source)
        counts = {
            dict(labels)["rpc_response_status_code"]: value
            for (name, labels), value in values.items()
            if name == "rpc_server_call_duration_seconds_count"
            and ("rpc_method", "kvgrpc.v1.SchedulerService/MatchTokens") in labels
        }
        assert sum(counts.values()) == len(answers) == 2
        assert "INVALID_ARGUMENT" in counts
        stream.cancel()


async def test_renewals_on_a_stream_are_counted_one_by_one_while_it_stands() -> None:
    async with serving("P") as source, connect(source.address) as client:
        stream: Any = lease_pb2_grpc.LeaseServiceStub(client.channel).KeepAlive(timeout=20)
        nobodys = lease_pb2.LeaseRef(lease_id="l-0000000000000001-00000000000000000000000000000001")
        for sequence in (1, 2):
            await stream.write(lease_pb2.KeepAliveRequest(leases=[nobodys], sequence=sequence))
            assert (await stream.read()).sequence == sequence
        values, name = await scrape(source), "rpc_server_call_duration_seconds_count"
        method = {"rpc_system_name": "grpc", "rpc_method": "kvgrpc.v1.LeaseService/RenewLeases"}
        assert at(values, name, **method, rpc_response_status_code="OK") == 2
        stream.cancel()


async def test_calls_that_a_busy_lead_refuses_are_counted_and_those_that_wait_are_shown() -> None:
    async with serving("P") as server:
        queue = server._lead.call_queue
        queue.crowd()
        calls = [queue.enter("a", BYTES_MAX // 4) for _ in range(9)]
        ends = await asyncio.gather(*calls, return_exceptions=True)
        refused = sum(isinstance(end, Exhausted) for end in ends)
        values = await scrape(server)
    assert at(values, "kvgrpc_calls_refused_total") == refused > 0
    assert (at(values, "kvgrpc_calls_waiting"), at(values, "kvgrpc_calls_backlog")) == (0, 0)


async def test_values_of_traced_requests_carry_their_trace() -> None:
    async with serving("P") as source, serving("D") as destination:
        with traced():
            await pulled(source, destination, list(range(32)))
        _, text = await get(destination, "/metrics", OPENMETRICS)
        families = openmetrics.text_string_to_metric_families(text)  # type: ignore[no-untyped-call]  # it has no types
        found = {
            sample.name
            for family in families
            for sample in family.samples
            if sample.exemplar and sample.exemplar.labels == {"trace_id": TRACE}
        }
        assert {"kvgrpc_transfer_duration_seconds_bucket", "kvgrpc_transfer_bytes_bucket"} <= found


async def test_every_family_of_the_table_is_named_as_prometheus_wants_it() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        assert not family.name.endswith(("_total", "_count", "_sum", "_bucket", "_ms"))
        if family.kind is MetricKind.HISTOGRAM:
            assert family.name.endswith(("_seconds", "_bytes"))


async def test_only_families_of_the_table_are_shown() -> None:
    async with serving("P") as server:
        _, text = await get(server, "/metrics")
        shown = {family.name for family in parse_text(text) if not family.name.startswith("process_")}
        assert shown <= {family.name for family in FAMILIES}


async def test_a_lead_that_drains_is_alive_and_not_ready() -> None:
    async with serving("P") as server, connect(server.address) as client:
        assert await get(server, "/readyz") == (200, "ok\n")
        await client.start_drain()
        assert await get(server, "/livez") == (200, "ok\n")
        assert (await get(server, "/readyz"))[0] == 503
        await client.cancel_drain()
        assert (await get(server, "/readyz"))[0] == 200


async def test_a_lead_without_an_engine_shows_that_it_has_none(tmp_path: Path) -> None:
    async with serving("P", pool=None, session_socket=str(tmp_path / "socket")) as server:
        values = await scrape(server)
        assert at(values, "kvgrpc_admission", state="no_engine") == 1
        assert at(values, "kvgrpc_admission", state="open") == 0
        assert (await get(server, "/readyz"))[0] == 503
        assert await get(server, "/livez") == (200, "ok\n")


async def test_a_value_that_cannot_be_read_is_a_typed_answer_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving("P") as server:
        monkeypatch.delattr(server._lead.runner, "defects")
        status, text = await get(server, "/metrics")
        assert (status, "a defect of kvgrpc" in text) == (500, True)
        assert "/metrics failed" in caplog.text


async def test_a_stalled_event_loop_is_not_alive_until_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "ANSWER_S", 0.2)
    async with serving("P") as server:
        with ThreadPoolExecutor(1) as pool:
            status, text = pool.submit(read, server, "/livez").result(20)  # nothing else runs on the loop meanwhile
        assert (status, "has not answered" in text) == (503, True)
        assert await get(server, "/livez") == (200, "ok\n")


@asynccontextmanager
async def silent(
    server: Server, count: int, begins: bytes = b"GET /metrics"
) -> AsyncIterator[list[asyncio.StreamReader]]:
    """Opens connections that send half a request, and yields what they hear."""
    host, _, port = server.metrics_address.rpartition(":")
    async with AsyncExitStack() as stack:
        readers = []
        for _ in range(count):
            reader, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            writer.write(begins)
            readers.append(reader)
        yield readers


def request_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]


async def test_a_connection_takes_the_place_of_one_that_sends_nothing() -> None:
    async with serving("P") as server, silent(server, CONNECTIONS_MAX + 8) as readers:
        assert await get(server, "/livez") == (200, "ok\n")
        ended = [await asyncio.wait_for(reader.read(), 20) for reader in readers[:8]]
        assert ended == [b""] * 8
        # A thread ends a moment after its connection.
        await asyncio.to_thread(wait_until, lambda: len(request_threads()) <= CONNECTIONS_MAX)


async def test_a_connection_takes_the_place_of_one_that_does_not_end_its_handshake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "REQUEST_S", 3_600.0)
    tls, record = TlsConfig(dir=str(People(tmp_path).files("P").cert.parent)), b"\x16\x03\x01"
    async with (
        serving("P", advertise="localhost:0", tls=tls) as server,
        silent(server, CONNECTIONS_MAX + 8, record) as readers,
    ):
        ended = [await asyncio.wait_for(reader.read(), 20) for reader in readers[:8]]
        assert ended == [b""] * 8
        await asyncio.to_thread(wait_until, lambda: len(request_threads()) <= CONNECTIONS_MAX)


async def test_a_request_that_trickles_in_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "REQUEST_S", 0.2)
    async with serving("P") as server:
        host, _, port = server.metrics_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        heard = asyncio.create_task(reader.read())
        async with asyncio.timeout(20):
            while not (await asyncio.wait({heard}, timeout=0.05))[0]:
                writer.write(b"x")  # so that no wait for a byte is long
        assert not heard.exception()
        writer.close()


async def test_scrapes_in_short_order_share_one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "AGAIN_S", 3_600.0)
    async with serving("P") as server, connect(server.address) as client:
        await scrape(server)
        await client.allocate(2)
        assert at(await scrape(server), "kvgrpc_blocks", space="0", state="allocated") == 0
        monkeypatch.setattr(endpoint, "AGAIN_S", 0.0)
        assert at(await scrape(server), "kvgrpc_blocks", space="0", state="allocated") == 2


async def test_the_endpoint_shows_the_leads_certificate_and_asks_for_none(tmp_path: Path) -> None:
    people = People(tmp_path)
    tls = TlsConfig(dir=str(people.files("P").cert.parent))
    async with serving("P", advertise="localhost:0", tls=tls) as server:
        _, _, port = server.metrics_address.rpartition(":")
        context = ssl.create_default_context(cafile=str(people.files("P").ca))

        def read() -> bytes:
            with urllib.request.urlopen(f"https://localhost:{port}/metrics", context=context, timeout=20) as reply:
                return bytes(reply.read())

        assert b"kvgrpc_tls_certificate_not_after_seconds" in await asyncio.to_thread(read)


async def test_a_taken_address_is_a_typed_error() -> None:
    async with serving("P") as server:
        with pytest.raises(AddressInUse, match="metrics"):
            async with serving("D", metrics=server.metrics_address):
                pass


def test_metrics_off_loopback_need_tls_or_the_word_insecure() -> None:
    with pytest.raises(KVGrpcError, match=r"metrics: .*not loopback"):
        Config(metrics="0.0.0.0:9464")
    assert Config(metrics="0.0.0.0:9464", insecure=True).metrics
