"""One request is one trace: router, both servers, both leads and the data path, without an orphaned span."""

import base64
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.otlp import Collector, Span
from tests.vllm.engines import PREFILL, START_S, prompt_of, pushed, wait_until
from tests.vllm.telemetry.conftest import Servers, exporting
from tests.vllm.telemetry.legs import Router

DECODE = {"do_remote_decode": False, "do_remote_prefill": True}


@pytest.fixture
def router(collector: Collector) -> Iterator[Router]:
    router = Router(collector.endpoint)
    yield router
    router.close()


def of_trace(collector: Collector, trace_id: str) -> list[Span]:
    return [span for span in collector.spans if span.trace_id == trace_id]


def loose(spans: list[Span]) -> list[Span]:
    """Returns the spans whose parent did not arrive, and every root after the first."""
    ids = {span.span_id for span in spans}
    return [span for span in spans if span.parent_id and span.parent_id not in ids] + [
        span for span in spans if not span.parent_id
    ][1:]


def whole(collector: Collector, trace_id: str, **wanted: int) -> list[Span]:
    """Returns the trace, once it has this many spans of each name and no orphan. `_` stands for a dot or a blank."""

    def counts() -> dict[str, int]:
        spans = of_trace(collector, trace_id)
        names = [span.name.replace(".", "_").replace(" ", "_") for span in spans]
        return {name: names.count(name) for name in wanted} | {"loose": len(loose(spans))}

    wait_until(lambda: counts() == wanted | {"loose": 0}, counts)
    return of_trace(collector, trace_id)


def named(spans: list[Span], name: str) -> Span:
    (found,) = (span for span in spans if span.name == name)
    return found


BOTH_SERVERS = {"request": 1, "leg_P": 1, "leg_D": 1, "llm_request": 2, "kvgrpc_send": 1, "kvgrpc_receive": 1}


@pytest.mark.parametrize("stated", ["header", "params"])
@pytest.mark.parametrize("relayed", [True, False], ids=["both legs say it", "prefill's answer says it"])
def test_a_pull_is_one_trace_through_router_servers_leads_and_data_path(
    servers: Servers, collector: Collector, router: Router, stated: str, relayed: bool
) -> None:
    """vLLM makes no span of its own if no header reaches the server."""
    p, d = servers
    prompt = prompt_of(200, 300 + 2 * relayed + (stated == "params"))
    with router.request() as trace_id:
        answer = router.leg(p, prompt, stated=stated, max_tokens=1, kv_transfer_params=PREFILL)
        params = answer["kv_transfer_params"]
        router.leg(d, prompt, stated=stated if relayed else "nowhere", kv_transfer_params=params)
    headers = stated == "header"
    spans = whole(collector, trace_id, **BOTH_SERVERS | {"llm_request": headers + (headers and relayed)}, kvgrpc_wire=1)
    received, sent = named(spans, "kvgrpc.receive"), named(spans, "kvgrpc.send")
    assert {received.service, sent.service} == {"D", "P"}
    assert received.attributes["kvgrpc.state"] == sent.attributes["kvgrpc.state"] == "succeeded"
    leg = named(spans, "leg P"), named(spans, "leg D" if relayed else "leg P")
    assert (sent.parent_id, received.parent_id) == (leg[0].span_id, leg[1].span_id)
    assert {span.service for span in spans if span.name.endswith(("/OpenAccess", "/SettleAccess"))} == {"P", "D"}
    assert named(spans, "kvgrpc.wire").parent_id == received.span_id


def test_a_push_is_one_trace_whichever_leg_is_first(servers: Servers, collector: Collector, router: Router) -> None:
    p, d = servers
    prompt, key = prompt_of(300, 310), os.urandom(16)
    with router.request() as trace_id, ThreadPoolExecutor(2) as pool:
        target = {**DECODE, **pushed(key, p.lead)}
        decode = pool.submit(copy_context().run, router.leg, d, prompt, kv_transfer_params=target)
        prefill = pool.submit(
            copy_context().run, router.leg, p, prompt, max_tokens=1, kv_transfer_params={**PREFILL, **pushed(key)}
        )
        prefill.result()
        decode.result()
    spans = whole(collector, trace_id, **BOTH_SERVERS)
    assert named(spans, "kvgrpc.receive").parent_id == named(spans, "leg D").span_id
    assert named(spans, "kvgrpc.send").parent_id == named(spans, "leg P").span_id
    assert {span.service for span in spans if span.name.endswith("/RegisterPush")} == {"P", "D"}


def test_a_transfer_that_fails_is_in_the_trace_with_its_reason(
    servers: Servers, collector: Collector, router: Router
) -> None:
    p, d = servers
    prompt = prompt_of(200, 320)
    with router.request() as trace_id:
        ask = {**PREFILL, "kvgrpc_intent": {"ttl": "0.2s"}}
        params = router.leg(p, prompt, max_tokens=1, kv_transfer_params=ask)["kv_transfer_params"]
        wait_until(lambda: p.held() == {}, p.held)
        router.leg(d, prompt, kv_transfer_params=params)
    spans = whole(collector, trace_id, **BOTH_SERVERS)
    for name, service in (("kvgrpc.receive", "D"), ("kvgrpc.send", "P")):
        span = named(spans, name)
        assert (span.service, span.failed, span.attributes["kvgrpc.failure"]) == (service, True, "LEASE_EXPIRED")


@pytest.mark.timeout(START_S)
@pytest.mark.parametrize("send", ["put_async", "get"])
def test_named_tensors_are_in_the_trace_of_their_request(
    collector: Collector, router: Router, model_folder: Path, send: str
) -> None:
    key = {"transferKey": base64.b64encode(os.urandom(16)).decode()}
    with exporting(collector, model_folder, mode="tensors", send=send) as (p, d):
        prompt = prompt_of(200, 330)
        with router.request() as trace_id:
            ask: dict[str, Any] = {**PREFILL, "kvgrpc_intent": key | {"peer": {"address": d.lead}}}
            params = router.leg(p, prompt, max_tokens=1, kv_transfer_params=ask)["kv_transfer_params"]
            router.leg(d, prompt, stated="nowhere", kv_transfer_params=params)
        spans = whole(collector, trace_id, request=1, leg_P=1, leg_D=1, llm_request=1)
        moved = [span for span in spans if span.name == "kvgrpc.receive"]
        assert {span.service for span in moved} == {"D"}
        assert all(span.attributes["kvgrpc.state"] == "succeeded" for span in moved)
