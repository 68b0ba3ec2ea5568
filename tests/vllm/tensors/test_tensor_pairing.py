"""Requests find the other engine by their params, their id or the configuration; tensors are kept if none of these
names it.
"""

import os
import uuid
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kvgrpc.core.policy.values import OnLoss
from kvgrpc.integrations.vllm.tensors.messages import ExpectTask, TensorStep
from kvgrpc.integrations.vllm.tensors.options import SendMode
from kvgrpc.integrations.vllm.tensors.pairing import named_by_id
from kvgrpc.integrations.vllm.tensors.scheduler_side import TensorSchedulerSide
from tests.vllm.cores import PROMPT, request_of, scheduled
from tests.vllm.engines import PREFILL
from tests.vllm.tensors.sides import KEY, PEER, giving, intent, side_of, taking

OWN = "127.0.0.1:5000"
"""Address of each side of these tests."""
OTHER = "127.0.0.1:7000"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
DECODE = {"do_remote_prefill": True}
PROXY: dict[str, Any] = {"proxy_ip": "127.0.0.1", "proxy_port": 30001}


def id_of(prefill: str, decode: str, name: str = "") -> str:
    """Returns the id that vLLM makes of the one that a proxy gives both legs."""
    name = name or uuid.uuid4().hex
    return f"cmpl-___prefill_addr_{prefill}___decode_addr_{decode}_{name}-0-{os.urandom(4).hex()}"


def puts_of(side: TensorSchedulerSide, request: Any) -> TensorStep:
    """Returns the step that computes the request's prompt."""
    side.arrived(request)
    return side.step(scheduled({request.request_id: len(PROMPT)}))


def expected_of(side: TensorSchedulerSide, request: Any) -> ExpectTask:
    side.arrived(request)
    side.match(request, 0)
    (expect,) = side.step(scheduled()).expects
    return expect


@pytest.mark.parametrize("send", list(SendMode))
def test_what_no_router_says_where_to_put_is_kept_and_the_answer_says_so(send: SendMode) -> None:
    side, request = side_of(send=send), request_of("a", PREFILL)
    assert {put.to for put in puts_of(side, request).puts} == {""}
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    answered = side.finished(request)
    assert answered is not None
    assert answered["kvgrpc_intent"]["mode"] == "TRANSFER_MODE_PULL"
    expect = expected_of(side_of(send=SendMode.PUT_ASYNC), request_of("b", answered))
    assert (expect.fetches, expect.source, expect.let_go) == (True, OWN, 0)


def test_what_is_put_is_waited_for_whatever_is_configured() -> None:
    side, request = side_of(), giving("a")
    assert {put.to for put in puts_of(side, request).puts} == {PEER}
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    expect = expected_of(side_of(send=SendMode.GET), request_of("b", side.finished(request)))
    assert (expect.fetches, expect.source) == (False, OWN)


@pytest.mark.parametrize(("mode", "to"), [("PULL", ""), ("PUSH", PEER)])
@pytest.mark.parametrize("send", list(SendMode))
def test_a_router_may_say_whether_tensors_are_put_or_fetched(send: SendMode, mode: str, to: str) -> None:
    said = intent()["kvgrpc_intent"] | {"mode": f"TRANSFER_MODE_{mode}"}
    step = puts_of(side_of(send=send), request_of("a", {**PREFILL, "kvgrpc_intent": said}))
    assert {put.to for put in step.puts} == {to}
    expect = expected_of(side_of(send=send), request_of("b", {"do_remote_prefill": True, "kvgrpc_intent": said}))
    assert expect.fetches is (mode == "PULL")


@pytest.mark.parametrize(("peers", "to"), [([OTHER], OTHER), ([OTHER, "127.0.0.1:7001"], "")])
def test_tensors_are_put_at_the_peer_of_a_configuration_that_has_one(peers: list[str], to: str) -> None:
    step = puts_of(side_of(peers=tuple(peers)), request_of("a", PREFILL))
    assert {put.to for put in step.puts} == {to}


def test_nothing_is_exchanged_with_who_is_none_of_the_peers_of_a_configuration() -> None:
    side = side_of(peers=(OTHER,), on_loss=OnLoss.FAIL)
    mine = intent(peer="127.0.0.1:7001")
    step = puts_of(side, request_of("a", {**PREFILL, **mine}))
    assert (step.puts, step.ended) == ([], [KEY])
    request = request_of("b", {"do_remote_prefill": True, **mine})
    side.arrived(request)
    assert side.match(request, 0) == (len(PROMPT), True)


@pytest.mark.parametrize("options", [PROXY, {"peers": (OTHER,)}], ids=["registered", "peers"])
def test_the_id_that_a_proxy_gives_both_legs_pairs_them(options: dict[str, Any]) -> None:
    name = uuid.uuid4().hex
    step = puts_of(side_of(**options), request_of(id_of(OWN, OTHER, name), None))
    assert {put.to for put in step.puts} == {OTHER}
    expect = expected_of(side_of(**options), request_of(id_of(OTHER, OWN, name), None))
    assert (expect.source, expect.fetches) == (OTHER, False)
    first, second = id_of(OWN, OTHER, name), id_of(OWN, OTHER, name)
    of = [named_by_id(first, OWN), named_by_id(second, OTHER), named_by_id(id_of(OWN, OTHER), OWN)]
    keys = [wants.key for wants in of if wants is not None]
    assert keys[0] == keys[1] != keys[2]


def test_engines_that_share_a_secret_pair_ids_by_it(tmp_path: Path) -> None:
    files = [tmp_path / name for name in "ab"]
    for file in files:
        file.write_text(file.name * 32)
    request_id = id_of(OWN, OTHER, uuid.uuid4().hex)
    texts = ["", *map(str, files)]
    gives = [puts_of(side_of(**PROXY, pairing_secret_file=text), request_of(request_id, None)) for text in texts]
    keys = [step.puts[0].key for step in gives]
    assert len(set(keys)) == 3
    takes = named_by_id(request_id, OTHER, secret=b"a" * 32)
    assert takes is not None
    assert keys[1] == takes.key


def test_what_params_say_goes_before_what_the_id_says() -> None:
    request = request_of(id_of(OWN, OTHER), {**PREFILL, **intent(peer="127.0.0.1:7001")})
    assert {put.to for put in puts_of(side_of(**PROXY), request).puts} == {"127.0.0.1:7001"}
    request = request_of(id_of(OWN, OTHER), {**PREFILL, "kvgrpc_intent": {"transferKey": "a2tra2tra2tra2tra2traw=="}})
    (*_, put) = puts_of(side_of(**PROXY), request).puts
    assert (put.to, put.key) == (OTHER, b"k" * 16)


@pytest.mark.parametrize(
    ("request_id", "options"),
    [
        (id_of(OWN, OTHER), {}),
        (id_of("127.0.0.1:8000", OTHER), PROXY),
        (id_of(OTHER, "127.0.0.1:8000"), PROXY),
        (id_of(OWN, OWN), PROXY),
        (id_of(OWN, OTHER, "not random"), PROXY),
        (id_of(OWN, OTHER) + "-and more", PROXY),
        ("___prefill_addr_" * 4000, PROXY),
    ],
    ids=["nobody registered", "another's", "another's, too", "one engine", "no key", "more", "long"],
)
def test_an_id_that_is_no_proxys_for_this_engine_moves_nothing(request_id: str, options: dict[str, Any]) -> None:
    side, request = side_of(**options), request_of(request_id, None)
    step = puts_of(side, request)
    assert (step.puts, step.ended) == ([], [])
    assert side.match(request, 0) == (0, False)


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("shape", ["cmpl-{}-{}-0a1b2c3d", "cmpl-{}-{}", "1_cmpl-{}-{}-12345678"])
def test_prompts_of_one_request_have_keys_of_their_own_and_answers_to_one_have_not(shape: str, number: int) -> None:
    base = f"___prefill_addr_[::1]:5000___decode_addr_host-1.local:7000_{uuid.uuid4()}"
    found = named_by_id(shape.format(base, number), "[::1]:5000")
    other = named_by_id(f"cmpl-{base}-0-ffffffff", "host-1.local:7000")
    assert found is not None
    assert other is not None
    assert (found.gives, other.gives, found.peer, other.peer) == (True, False, "host-1.local:7000", "[::1]:5000")
    assert (found.key == other.key) is (number == 0)
    chat = [named_by_id(f"chatcmpl-{base}{end}", "[::1]:5000") for end in ("", "-12345678", "-0a1b2c3d")]
    assert len({wants.key for wants in chat if wants is not None}) == 1


@pytest.mark.parametrize("stated", ["headers", "params"])
@pytest.mark.parametrize("by", ["params", "id"])
def test_what_a_request_gives_and_takes_is_in_its_trace(stated: str, by: str) -> None:
    """This includes requests whose id says what they want. The answer carries the trace to the other engine."""
    trace = {"traceparent": TRACE}
    more: dict[str, Any] = {"trace_headers": trace} if stated == "headers" else {}
    params = [
        {**flag, **(intent() if by == "params" else {}), **(trace if stated == "params" else {})}
        for flag in ((PREFILL, DECODE) if by == "params" else ({}, {}))
    ]
    given = request_of("a" if by == "params" else id_of(OWN, OTHER), params[0], **more)
    side = side_of(**PROXY)
    assert {put.traceparent for put in puts_of(side, given).puts} == {TRACE}
    given.status = RequestStatus.FINISHED_LENGTH_CAPPED
    answered = side.finished(given)
    assert answered is not None
    assert answered["traceparent"] == TRACE
    taken = request_of("b" if by == "params" else id_of(OTHER, OWN), params[1], **more)
    assert expected_of(side_of(**PROXY), taken).traceparent == TRACE


def test_a_request_that_takes_by_its_id_and_is_refused_is_lost() -> None:
    side = side_of(**PROXY, on_loss=OnLoss.FAIL)
    request = request_of(id_of(OTHER, OWN), None, prompt_token_ids=None, prompt_embeds=object())
    side.arrived(request)
    assert side.match(request, 0) == (len(PROMPT), True)


def test_a_request_of_no_router_takes_and_gives_nothing() -> None:
    side = side_of()
    for params in (None, {}, "text", {"do_remote_prefill": False}):
        request = request_of("a", params)
        assert puts_of(side, request).puts == []
        assert side.match(request, 0) == (0, False)
    assert expected_of(side, taking("b")).source == PEER
