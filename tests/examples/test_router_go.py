"""The router in Go, end to end: real leads, engines without a model, clients that leave, engines that drain and die.

In every case nothing is left at the end: no pin, no lease, no transfer under way, no allocated block.
"""

import subprocess
import threading
from collections.abc import Iterator

import pytest

from kvgrpc.v1.transfer_pb2 import TRANSFER_STATE_CANCELLED as CANCELLED, TRANSFER_STATE_SUCCEEDED as SUCCEEDED
from tests.e2e.otlp import Collector, collecting
from tests.examples.go_router import GO, HERE, KINDS, MODES, NEEDS_GO, Begin, begin, binary, moving, prompt
from tests.examples.http_engines import HttpEngine, until
from tests.service.conftest import start

__all__ = ["begin", "binary", "start"]

ALLOCATION_TTL_S = 60
"""Value of the router's `allocationTTL`, in seconds."""
pytestmark = NEEDS_GO


@pytest.mark.slow
def test_its_own_tests_pass_and_vet_finds_nothing() -> None:
    for command in ("vet", "test"):
        subprocess.run([str(GO), command, "./..."], cwd=HERE, check=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_requests_are_served_and_leave_nothing(begin: Begin, kind: str, mode: str) -> None:
    router = begin(kind, mode)
    for seed in range(3):
        router.serves(seed)
    router.at_rest()
    for engine in (*router.prefills, *router.decodes):
        transfers = engine.client.list_transfers().transfers
        assert [transfer.state for transfer in transfers] == [SUCCEEDED] * 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_leaves_between_prefill_and_decode_leaves_nothing(begin: Begin, kind: str, mode: str) -> None:
    router = begin(kind, mode, slow=True)
    p, d = router.prefills[0], router.decodes[0]
    router.hang_up(1, lambda: until(lambda: moving(d.lead)))
    router.at_rest()
    for engine in (p, d):
        assert [transfer.state for transfer in engine.client.list_transfers().transfers] == [CANCELLED]


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
        engine.client.start_drain()
        until(lambda e=engine: not router.row(e)["takes_work"])  # type: ignore[misc]
        assert router.row(engine)["admission"] == "ADMISSION_DRAINING"
    for seed in range(4):
        router.serves(seed)
    for idle, busy in ((router.prefills[0], router.prefills[1]), (router.decodes[1], router.decodes[0])):
        assert len(idle.computed) + len(idle.completed) == 0
        assert len(busy.computed) + len(busy.completed) == 4
    router.decodes[0].client.start_drain()
    until(lambda: router.health()["status"] == 503)
    assert router.post({"prompt": prompt(5), "max_tokens": 1})[0] == 503
    router.at_rest()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_lead_that_is_killed_is_replaced_with_the_same_grant(begin: Begin, kind: str) -> None:
    router = begin(kind, "pull", decodes=2, slow=True)
    chosen: list[HttpEngine] = []

    def kill_the_one_that_pulls() -> None:
        until(lambda: bool(pulling()))
        chosen.extend(pulling())
        router.kill(chosen[0])

    def pulling() -> list[HttpEngine]:
        return [engine for engine in router.decodes if moving(engine.lead)]

    killing = threading.Thread(target=kill_the_one_that_pulls)
    killing.start()
    router.serves(1)
    killing.join()
    (p,) = router.prefills
    assert len(p.computed) + len(p.completed) == 1
    router.at_rest(chosen[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefill_lead_that_is_killed_costs_a_computation(begin: Begin, kind: str) -> None:
    """Its KV is lost with it, so the decode engine computes the prompt."""
    router = begin(kind, "pull", slow=True)
    p, d = router.prefills[0], router.decodes[0]

    def kill_once_it_is_read() -> None:
        until(lambda: moving(d.lead))
        router.kill(p)

    killing = threading.Thread(target=kill_once_it_is_read)
    killing.start()
    router.serves(1)
    killing.join()
    last = (d.computed or d.completed)[-1]
    assert last.get("computed_tokens", 0) == 0
    assert "kv_transfer_params" not in last
    router.at_rest(p)


@pytest.mark.slow
def test_a_router_that_is_killed_leaves_nothing_for_long(begin: Begin) -> None:
    """Nobody tells the leads: the lease and the allocation end with their TTLs, because nobody renews them."""
    router = begin("drive", "pull")
    router.decodes[0].gate.clear()

    def kill() -> None:
        router.decodes[0].arrived.acquire()
        router.process.kill()

    router.hang_up(1, kill)
    # Twice the allocation's TTL: only its end, not a longer default, frees the blocks in that time.
    until(
        lambda: router.decodes[0].client.pool_status().groups[0].allocated_block_count == 0,
        timeout_s=2 * ALLOCATION_TTL_S,
    )
    router.decodes[0].gate.set()
    router.at_rest()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_is_one_trace_from_client_to_leads(begin: Begin, collector: Collector, kind: str) -> None:
    more = {"OTEL_EXPORTER_OTLP_INSECURE": "true", "OTEL_BSP_SCHEDULE_DELAY": "100"}
    router = begin(kind, "pull", OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint, **more)
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
