"""The router in Go, end to end: real leads, engines without a model, clients that leave, engines that drain and die.

Whatever happens, nothing is left at the end: no pin, no lease, no transfer that goes on, no block that is allocated.
"""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.client import SyncClient, connect_sync
from tests.e2e.otlp import Collector, collecting
from tests.examples.http_engines import HttpEngine, serving, token, until
from tests.service.conftest import Start, start
from tests.service.engines import Engine

__all__ = ["start"]

GO = shutil.which("go")
HERE = Path(__file__).resolve().parents[2] / "examples" / "router-go"
START_S = 60.0
KINDS = ("drive", "relay")
MODES = ("pull", "push")
SLOW = ("--bandwidth-limit-bytes-per-s", "2000")
"""Seconds for a prompt: there is a while between prefill and decode."""
# Building from an empty cache takes a minute or two.
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(GO is None, reason="go is not on the PATH"),
]


@dataclass
class Router:
    """A router process, its engines and their leads, each in the order of its role."""

    url: str
    process: "subprocess.Popen[bytes]"
    prefills: list[HttpEngine]
    decodes: list[HttpEngine]
    leads: dict[str, Engine]

    def post(self, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
        host, port = self.url.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        finally:
            connection.close()

    def serves(self, seed: int, **headers: str) -> None:
        """A request gets the tokens of its prompt."""
        ids = prompt(seed)
        status, answer = self.post({"model": "none", "prompt": ids, "max_tokens": 3}, **headers)
        assert status == 200, answer
        assert answer["choices"][0]["token_ids"] == [token(ids, place) for place in range(3)]

    def hang_up(self, seed: int, when: Callable[[], object]) -> None:
        """Sends a request, and leaves when it is time."""
        data = json.dumps({"model": "none", "prompt": prompt(seed), "max_tokens": 3}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", int(self.url.rpartition(":")[2]))) as client:
            client.sendall(head.encode() + data)
            when()

    def health(self) -> Any:
        host, port = self.url.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        try:
            connection.request("GET", "/healthz")
            reply = connection.getresponse()
            return json.loads(reply.read()) | {"status": reply.status}
        finally:
            connection.close()

    def row(self, engine: HttpEngine) -> Any:
        """How the router sees an engine."""
        (found,) = (row for row in self.health()["engines"] if row["lead"] == engine.lead)
        return found

    def lead_of(self, engine: HttpEngine) -> Engine:
        return self.leads[engine.lead]

    def at_rest(self, *gone: HttpEngine) -> None:
        """Nothing is left at any lead that lives."""
        for engine in (*self.prefills, *self.decodes):
            if engine not in gone:
                lead = self.lead_of(engine)
                until(lambda lead=lead: held(lead) == {}, lambda lead=lead: held(lead))  # type: ignore[misc]


def held(lead: Engine) -> dict[str, Any]:
    """What is left at a lead."""
    with engine_client(lead) as client:
        counts, pool = client.status().counts, client.pool_status().groups[0]
        pins = client.pins().pins
    names = (
        "pending_transfer_count",
        "active_transfer_count",
        "lease_count",
        "open_access_count",
        "pinned_block_count",
    )
    found = {name: getattr(counts, name) for name in names if getattr(counts, name)}
    found |= {"quarantined": pool.quarantined_block_count} if pool.quarantined_block_count else {}
    found |= {"allocated": pool.allocated_block_count} if pool.allocated_block_count else {}
    return found | ({"pins": str(pins)} if pins else {})


@contextmanager
def engine_client(lead: Engine) -> Iterator[SyncClient]:
    with connect_sync(lead.address) as client:
        yield client


def prompt(seed: int) -> list[int]:
    """Forty tokens: three blocks, the last one in part."""
    return [(seed * 131 + i * 7) % 1000 for i in range(40)]


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("go") / "router"
    subprocess.run([str(GO), "build", "-o", made, "."], cwd=HERE, check=True)
    return made


Begin = Callable[..., Router]


@pytest.fixture
def begin(binary: Path, start: Start, tmp_path: Path) -> Iterator[Begin]:
    """Starts a router with two engines of each role, or as many as are asked for."""
    with ExitStack() as stack:

        def make(
            kind: str, mode: str, prefills: int = 1, decodes: int = 1, slow: bool = False, **environment: str
        ) -> Router:
            flags = [("--engine-id", f"P{n}") for n in range(prefills)]
            flags += [("--engine-id", f"D{n}", *(SLOW if slow else ())) for n in range(decodes)]
            leads = start(*flags, **environment)
            engines = [stack.enter_context(serving(lead.address)) for lead in leads]
            command = [str(binary), "-listen", "127.0.0.1:0", "-mode", mode]
            for number, engine in enumerate(engines):
                role = "-prefill" if number < prefills else "-decode"
                command += [role, f"{kind},{engine.url},{engine.lead}"]
            process = stack.enter_context(running(command, tmp_path / "router.log", environment))
            router = Router(
                listening(process, tmp_path / "router.log"), process, engines[:prefills], engines[prefills:],
                {lead.address: lead for lead in leads},
            )  # fmt: skip
            until(lambda: all(row["takes_work"] for row in router.health()["engines"]), router.health)
            return router

        yield make


@contextmanager
def running(command: list[str], log: Path, environment: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=clean | environment)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(START_S)
        process.kill()
        process.wait()


def listening(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Where a router listens, once it says so."""

    def said() -> str:
        lines = [line for line in log.read_text().splitlines() if line.startswith("router: ")]
        return lines[0].split()[-1] if lines else ""

    until(lambda: bool(said()) or process.poll() is not None, log.read_text, START_S)
    assert process.poll() is None, log.read_text()
    return said()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_requests_are_served_and_leave_nothing(begin: Begin, kind: str, mode: str) -> None:
    router = begin(kind, mode)
    for seed in range(3):
        router.serves(seed)
    router.at_rest()
    for engine in (*router.prefills, *router.decodes):
        transfers = engine.client.list_transfers().transfers
        assert [transfer.state for transfer in transfers] == [3, 3, 3]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_leaves_between_prefill_and_decode_leaves_nothing(begin: Begin, kind: str, mode: str) -> None:
    router = begin(kind, mode, slow=True)
    p, d = (router.lead_of(engine) for engine in (router.prefills[0], router.decodes[0]))

    def bytes_move() -> bool:
        with engine_client(d) as client:
            return bool(client.status().counts.active_transfer_count)

    router.hang_up(1, lambda: until(bytes_move))
    router.at_rest()
    for lead in (p, d):
        with engine_client(lead) as client:
            assert [transfer.state for transfer in client.list_transfers().transfers] == [5]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", ["prefills", "decodes"])
def test_a_client_that_leaves_an_engine_at_work_leaves_nothing(begin: Begin, kind: str, role: str) -> None:
    router = begin(kind, "pull")
    engine = getattr(router, role)[0]
    engine.gate.clear()
    router.hang_up(2, engine.arrived.acquire)
    router.at_rest()
    engine.gate.set()
    router.serves(3)
    router.at_rest()


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_drains_ends_what_it_has_and_gets_nothing_new(begin: Begin, kind: str) -> None:
    router = begin(kind, "pull", prefills=2, decodes=2)
    for engine in (router.prefills[0], router.decodes[1]):
        engine.client.drain()
        until(lambda e=engine: not router.row(e)["takes_work"])  # type: ignore[misc]
        assert router.row(engine)["admission"] == "ADMISSION_DRAINING"
    for seed in range(4):
        router.serves(seed)
    for idle, busy in ((router.prefills[0], router.prefills[1]), (router.decodes[1], router.decodes[0])):
        assert len(idle.computed) + len(idle.completed) == 0
        assert len(busy.computed) + len(busy.completed) == 4
    router.decodes[0].client.drain()
    until(lambda: router.health()["status"] == 503)
    assert router.post({"prompt": prompt(5), "max_tokens": 1})[0] == 503
    router.at_rest()


@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_lead_that_is_killed_is_replaced_with_the_same_grant(begin: Begin, kind: str) -> None:
    router = begin(kind, "pull", decodes=2, slow=True)
    chosen: list[HttpEngine] = []

    def kill_the_one_that_pulls() -> None:
        until(lambda: bool(pulling()))
        chosen.extend(pulling())
        router.lead_of(chosen[0]).process.kill()

    def pulling() -> list[HttpEngine]:
        found = []
        for engine in router.decodes:
            if engine not in chosen:
                with engine_client(router.lead_of(engine)) as client:
                    if client.status().counts.active_transfer_count:
                        found.append(engine)
        return found

    killing = threading.Thread(target=kill_the_one_that_pulls)
    killing.start()
    router.serves(1)
    killing.join()
    (p,) = router.prefills
    assert len(p.computed) + len(p.completed) == 1
    router.at_rest(chosen[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefill_lead_that_is_killed_costs_a_computation(begin: Begin, kind: str) -> None:
    """Its KV is lost with it: the decode engine computes the prompt."""
    router = begin(kind, "pull", slow=True)
    p, d = router.prefills[0], router.decodes[0]

    def kill_once_it_is_read() -> None:
        with engine_client(router.lead_of(d)) as client:
            until(lambda: bool(client.status().counts.active_transfer_count))
        router.lead_of(p).process.kill()

    killing = threading.Thread(target=kill_once_it_is_read)
    killing.start()
    router.serves(1)
    killing.join()
    last = (d.computed or d.completed)[-1]
    assert last.get("computed_tokens", 0) == 0
    assert "kv_transfer_params" not in last
    router.at_rest(p)


def test_a_router_that_is_killed_leaves_nothing_for_long(begin: Begin) -> None:
    """Nobody tells the leads: the lease ends with its time, and the allocation, which nobody renews, with its own."""
    router = begin("drive", "pull")
    router.decodes[0].gate.clear()
    router.hang_up(1, lambda: (router.decodes[0].arrived.acquire(), router.process.kill()))
    with engine_client(router.lead_of(router.prefills[0])) as client:
        until(lambda: client.status().counts.lease_count == 0)
    with engine_client(router.lead_of(router.decodes[0])) as client:
        begun = time.monotonic()
        until(lambda: client.pool_status().groups[0].allocated_block_count == 0, timeout_s=90)
        assert time.monotonic() - begun < 70
    router.decodes[0].gate.set()
    router.at_rest()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_is_one_trace_from_client_to_leads(begin: Begin, collector: Collector, kind: str) -> None:
    router = begin(
        kind, "pull", OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint, OTEL_EXPORTER_OTLP_INSECURE="true",
        OTEL_BSP_SCHEDULE_DELAY="100",
    )  # fmt: skip
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    router.serves(1, traceparent=f"00-{trace_id}-{span_id}-01")

    def seen() -> dict[tuple[str, str], str]:
        return {(s.service, s.name): s.parent_id for s in collector.spans if s.trace_id == trace_id}

    wanted = {("kvgrpc-router", name) for name in ("POST /v1/completions", "prefill", "decode")}
    until(lambda: wanted <= seen().keys(), seen)
    assert seen()["kvgrpc-router", "POST /v1/completions"] == span_id
    for engine in (*router.prefills, *router.decodes):
        assert [trace.split("-")[1] for trace in engine.traces] == [trace_id]
    if kind == "drive":
        until(lambda: {"kvgrpc.send", "kvgrpc.receive"} <= {name for _, name in seen()}, seen)
