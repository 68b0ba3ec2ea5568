"""`kvgrpc fleet` as the endpoint picker of a real Envoy: where requests go, with what, and what clients cannot say."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.request import urlopen

import pytest

from kvgrpc.client import connect_sync
from kvgrpc.service.gateway.endpoint_picker import PROCESS
from kvgrpc.service.span_makers import TRACEPARENT
from tests.e2e.otlp import Collector, Span, collecting
from tests.service.conftest import Start
from tests.service.engines import Engine, wait_until
from tests.service.fleet.conftest import EnginesFile, row
from tests.service.fleet.envoy import NEEDS_ENVOY, HttpServer, ask, gateway
from tests.service.fleet.published import fleet
from tests.service.kept_spans import PARENT, SAMPLED, TRACE, UNSAMPLED

pytestmark = NEEDS_ENVOY

PREFILLER = "x-prefiller-host-port"
PLACES = 8
"""Number of streams that the picker serves at a time."""
MODES = ("NONE", "BUFFERED", "STREAMED", "FULL_DUPLEX_STREAMED")


class Pool:
    """Engines p and d, their HTTP servers, and the picker with the collector of its spans."""

    def __init__(
        self, leads: dict[str, Engine], servers: dict[str, HttpServer], picker: dict[str, str], collector: Collector
    ) -> None:
        self.leads, self.servers, self.collector = leads, servers, collector
        self.picker, self._metrics = picker["address"], picker["metrics"]

    def choices(self) -> set[str]:
        """Returns the outcomes of choices that the picker has counted."""
        with urlopen(f"http://{self._metrics}/metrics", timeout=20) as reply:
            shown = reply.read().decode()
        return set(re.findall(r'^kvgrpc_fleet_picks_total{outcome="(\w+)"} [1-9]', shown, re.MULTILINE))

    def wait_until_paired(self) -> None:
        with connect_sync(self.picker) as client:
            wait_until(lambda: client.fleet().pick_pair().decode.engine.engine_id == "d")

    def last(self, engine_id: str) -> tuple[dict[str, str], bytes]:
        """Returns the headers and the body of the last request that an engine got."""
        return self.servers[engine_id].requests[-1]


@pytest.fixture
def pool(start: Start, engines_file: EnginesFile, tmp_path: Path) -> Iterator[Pool]:
    leads = dict(zip("pd", start(("--engine-id", "p"), ("--engine-id", "d")), strict=True))
    roles = {"p": "prefill", "d": "decode"}
    engines_file.write([row(lead, role=roles[name], model_name="llama") for name, lead in leads.items()])
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(closing(HttpServer(name, lead.address.partition(":")[0])))
            for name, lead in leads.items()
        }
        collector = stack.enter_context(collecting())
        exported = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
        rules = ",".join(f"{name}={{host}}:{one.address.partition(':')[2]}" for name, one in servers.items())
        environment = engines_file.environment | exported | {"KVGRPC_FLEET_HTTP": rules, "KVGRPC_FLEET_MODEL": "llama"}
        settings = tmp_path / "settings.toml"
        settings.write_text(f"[limits]\nstanding = {PLACES}\nstanding_per_connection = {PLACES}\n")
        found = stack.enter_context(
            fleet(tmp_path / "fleet", "--config", str(settings), "--metrics", "127.0.0.1:0", **environment)
        )
        made = Pool(leads, servers, found, collector)
        made.wait_until_paired()
        yield made


@pytest.mark.parametrize("mode", MODES)
def test_a_request_goes_whole_to_the_decode_engine_and_names_the_prefill_engine(
    pool: Pool, tmp_path: Path, mode: str
) -> None:
    body = bytes(range(256)) * 1_000
    with gateway(tmp_path / "envoy", pool.picker, mode) as address:
        forged = {"x_prefiller_host_port": "10.0.0.1:80", "x_gateway_destination_endpoint": pool.servers["p"].address}
        for given in ({}, forged):
            assert ask(address, "POST", "/v1/completions", body, **given) == (200, "d")
            headers, arrived = pool.last("d")
            assert arrived == body
            assert headers[PREFILLER] == pool.servers["p"].address
    assert pool.servers["p"].requests == []


def test_without_a_pair_the_decode_engine_computes_alone_and_nobody_names_another(
    pool: Pool, engines_file: EnginesFile, tmp_path: Path
) -> None:
    engines_file.write([row(pool.leads["d"], role="decode", model_name="llama")])
    with connect_sync(pool.picker) as client, gateway(tmp_path / "envoy", pool.picker) as address:
        wait_until(lambda: not client.fleet().pick_pair().decode.engine.engine_id)
        assert ask(address, "POST", "/v1/completions", b"x", x_prefiller_host_port="10.0.0.1:80") == (200, "d")
        assert PREFILLER not in pool.last("d")[0]
        assert "alone" in pool.choices()
        engines_file.write([row(pool.leads["d"], role="decode", model_name="another")])
        wait_until(lambda: ask(address, "POST", "/v1/completions", b"x")[0] == 503)
        assert "llama" not in ask(address, "POST", "/v1/completions", b"x")[1], "a client may be anybody"
        assert pool.choices() == {"pair", "alone", "none"}
        wait_until(lambda: "no_pair_of_llama" in (tmp_path / "envoy" / "access.log").read_text())


@pytest.mark.parametrize("mode", ["NONE", "FULL_DUPLEX_STREAMED"])
def test_a_request_with_a_trace_has_a_span_at_the_picker(pool: Pool, tmp_path: Path, mode: str) -> None:
    with gateway(tmp_path / "envoy", pool.picker, mode) as address:
        for context in (UNSAMPLED, SAMPLED):
            assert ask(address, "POST", "/v1/completions", b"x" * 100_000, traceparent=context) == (200, "d")
            assert pool.last("d")[0][TRACEPARENT] == context, "the picker leaves the client's context as it is"

        def spans() -> list[Span]:
            return [span for span in pool.collector.spans if span.name == PROCESS]

        wait_until(lambda: bool(spans()))
    (span,) = spans()
    assert (span.trace_id, span.parent_id, span.failed) == (TRACE, PARENT, False)


def test_the_gateway_says_which_engines_are_allowed(pool: Pool, tmp_path: Path) -> None:
    both = [one.address for one in pool.servers.values()]
    with gateway(tmp_path / "both", pool.picker, allowed=both) as address:
        assert ask(address, "POST", "/", b"x") == (200, "d")
        assert PREFILLER in pool.last("d")[0]
    with gateway(tmp_path / "one", pool.picker, allowed=[pool.servers["d"].address]) as address:
        assert ask(address, "POST", "/", b"x") == (200, "d")
        assert PREFILLER in pool.last("d")[0], "the gateway sends no requests to an engine that prefills alone"
    with gateway(tmp_path / "none", pool.picker, allowed=["10.0.0.1:80"]) as address:
        assert ask(address, "POST", "/", b"x")[0] == 503


def test_requests_whose_answers_take_long_have_no_place_at_the_picker(pool: Pool, tmp_path: Path) -> None:
    engine, count = pool.servers["d"], 3 * PLACES
    engine.gate.clear()
    with gateway(tmp_path / "envoy", pool.picker, "BUFFERED") as address, ThreadPoolExecutor(count) as threads:
        answers = []
        try:
            for number in range(1, count + 1):
                answers.append(threads.submit(ask, address, "POST", "/", b"x"))
                wait_until(lambda: len(engine.requests) == number)  # noqa: B023 - called at once
        finally:
            engine.gate.set()
        assert {answer.result() for answer in answers} == {(200, "d")}


def test_streams_of_whole_requests_give_their_places_back(pool: Pool, tmp_path: Path) -> None:
    with gateway(tmp_path / "envoy", pool.picker, "FULL_DUPLEX_STREAMED") as address:
        assert {ask(address, "POST", "/", b"x") for _ in range(4 * PLACES)} == {(200, "d")}
