"""Engines of two programs: vLLM prefills for SGLang's decode, and SGLang prefills for vLLM."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgrpc.core.values.layout import Group, GroupKind, uniform_layout
from kvgrpc.engine import Engine, Failed, Rank, content
from kvgrpc.integrations.across import identity_of, stated_config
from kvgrpc.integrations.derived_keys import room_key
from tests.sglang.programs import ACROSS, DTYPE, VLLM, Programs, VLLMServer, sglang_to_vllm, tokens_of, vllm_to_sglang
from tests.sglang.servers import Server, ids_of, prompt_of, sampled, wait_until

pytestmark = pytest.mark.skipif(not VLLM.exists(), reason=f"no vLLM at {VLLM}: `make vllm`, or VLLM_VENV")
LENGTHS = (2, 16, 17, 33, 200, 300, 700)
"""Below and above a block of either engine, and of several chunks."""
TOKENS = 10
BIAS = 10.0
"""Logit bias at which a token is sampled again and again, until a penalty is greater."""


def sampling(tokens: int, **more: Any) -> dict[str, Any]:
    """Returns SGLang's parameters of a greedy answer."""
    return {**sampled(tokens)["sampling_params"], **more}


def one_alone(programs: Programs, prompt: list[int], **more: Any) -> dict[str, Any]:
    """Returns the answer of one SGLang engine."""
    assert programs.one is not None
    return programs.one.ask("/generate", {"input_ids": prompt, **more})


@pytest.fixture(scope="module")
def programs(folder: Path) -> Iterator[Programs]:
    """Yields engines whose blocks, pages and orders within them differ."""
    with ExitStack() as stack:
        flags = ("--dtype", DTYPE)
        one = Server("across-one", folder, "", 16, flags)
        made = Programs(
            VLLMServer(folder),
            Server("across-P", folder, "prefill", 16, flags, **ACROSS),
            Server("across-D", folder, "decode", 16, flags, **ACROSS),
            one,
        )
        servers: tuple[VLLMServer | Server, ...] = (made.vllm, made.prefill, made.decode, one)
        for server in servers:
            stack.callback(server.stop)
            server.start()
        for server in servers:
            server.wait()
        yield made


def test_what_vllm_prefills_sglang_answers_with_the_tokens_of_one_engine(programs: Programs) -> None:
    for length in LENGTHS:
        prompt = prompt_of(length, seed=length)
        found = vllm_to_sglang(programs, prompt, TOKENS)
        assert ids_of(found) == programs.vllm.alone(prompt, TOKENS), length
        counted = [found["meta_info"][name] for name in ("prompt_tokens", "completion_tokens")]
        assert counted == [length, TOKENS]
    wait_until(programs.at_rest, programs.all_held)


def test_what_sglang_prefills_vllm_answers_with_the_tokens_of_one_engine(programs: Programs) -> None:
    for length in LENGTHS:
        prompt, before = prompt_of(length, seed=1000 + length), programs.vllm.received_tokens()
        found = tokens_of(sglang_to_vllm(programs, prompt, TOKENS))
        assert found == programs.vllm.alone(prompt, TOKENS), length
        assert programs.vllm.received_tokens() - before == length - 1, "decode computes the last token"
    wait_until(programs.at_rest, programs.all_held)


def test_requests_at_once_in_both_directions_get_their_own_tokens(programs: Programs) -> None:
    prompts = [prompt_of(40 + 23 * number, seed=2000 + number) for number in range(10)]

    def play(number: int) -> list[int]:
        if number % 2:
            return ids_of(vllm_to_sglang(programs, prompts[number], TOKENS))
        return tokens_of(sglang_to_vllm(programs, prompts[number], TOKENS))

    with ThreadPoolExecutor(len(prompts)) as threads:
        found = list(threads.map(play, range(len(prompts))))
    assert found == [programs.vllm.alone(prompt, TOKENS) for prompt in prompts]
    wait_until(programs.at_rest, programs.all_held)


def test_an_answer_of_one_token_and_its_log_probability_are_those_of_the_prompt(programs: Programs) -> None:
    prompt = prompt_of(100, seed=3000)
    found = vllm_to_sglang(programs, prompt, 1, return_logprob=True)
    assert ids_of(found) == programs.vllm.alone(prompt, 1)
    ((_, token, *_),) = found["meta_info"]["output_token_logprobs"]
    assert token == ids_of(found)[0]


@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": 1.5}, {"presence_penalty": 2.0}, {"repetition_penalty": 2.0}, {}]
)
def test_penalties_count_the_answer_and_not_the_token_of_the_prompt_that_decode_computes(
    programs: Programs, penalty: dict[str, float]
) -> None:
    for seed in range(5000, 5004):
        prompt = prompt_of(70, seed)
        asked = {"sampling_params": sampling(TOKENS, logit_bias={str(prompt[-1]): BIAS}, **penalty)}
        expected = ids_of(one_alone(programs, prompt, **asked))
        assert prompt[-1] in expected, "the bias favours the last token of the prompt"
        assert ids_of(vllm_to_sglang(programs, prompt, TOKENS, **asked)) == expected


def test_requests_with_other_penalties_at_once_get_the_tokens_of_one_engine(programs: Programs) -> None:
    prompts = [prompt_of(30 + 11 * number, seed=6000 + number) for number in range(8)]
    asked = [
        {"sampling_params": sampling(TOKENS, logit_bias={str(prompt[-1]): BIAS}, frequency_penalty=0.5 * (number % 3))}
        for number, prompt in enumerate(prompts)
    ]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = threads.map(lambda prompt, params: vllm_to_sglang(programs, prompt, TOKENS, **params), prompts, asked)
        found = [ids_of(answer) for answer in answers]
    assert found == [
        ids_of(one_alone(programs, prompt, **params)) for prompt, params in zip(prompts, asked, strict=True)
    ]


@pytest.mark.parametrize("at", [1, 3])
def test_minimum_lengths_and_stops_count_the_answer_alone(programs: Programs, at: int) -> None:
    prompt = prompt_of(90, seed=7000)
    free = ids_of(one_alone(programs, prompt, **sampled(TOKENS)))
    for limits in (
        {"stop_token_ids": [free[at - 1]], "min_new_tokens": at},
        {"stop_token_ids": [free[at - 1]]},
        {"stop": [f"w{free[at]}"], "min_new_tokens": 1},
    ):
        asked = {"sampling_params": sampling(TOKENS, **limits)}
        found, expected = vllm_to_sglang(programs, prompt, TOKENS, **asked), one_alone(programs, prompt, **asked)
        assert ids_of(found) == ids_of(expected), limits
        for name in ("finish_reason", "completion_tokens"):
            assert found["meta_info"][name] == expected["meta_info"][name], limits


def test_a_prompt_of_one_token_is_refused_by_sglang_at_once(programs: Programs) -> None:
    body = {"input_ids": [5], "bootstrap_host": "127.0.0.1", "bootstrap_room": 7, **sampled(2)}
    answers = [
        programs.prefill.ask("/generate", {**body, "bootstrap_port": programs.prefill.lead_port}),
        programs.decode.ask("/generate", {**body, "bootstrap_port": programs.vllm.lead_port}),
    ]
    assert all("one token" in answer["error"] for answer in answers), answers
    wait_until(programs.at_rest, programs.all_held)


def test_clients_that_hang_up_across_engines_leave_all_blocks_free(programs: Programs) -> None:
    place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": programs.vllm.lead_port, "bootstrap_room": 11}
    lost = programs.decode.ask("/generate", {"input_ids": prompt_of(90, 4000), **place, **sampled(4)}, timeout_s=1.0)
    assert "timed out" in lost["error"]
    params = {"do_remote_prefill": True, **place, "bootstrap_port": programs.prefill.lead_port}
    assert "timed out" in programs.vllm.ask(prompt_of(90, 4001), 4, params, timeout_s=1.0)["error"]
    wait_until(programs.at_rest, programs.all_held)
    prompt = prompt_of(600, seed=4002)
    expected = programs.vllm.alone(prompt, TOKENS)
    assert ids_of(vllm_to_sglang(programs, prompt, TOKENS)) == expected
    assert tokens_of(sglang_to_vllm(programs, prompt, TOKENS)) == expected


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"block_tokens": 24}, "block_token"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"layers": 3}, "layer_count"),
        ({"head_dim": 64}, "head_dim"),
        ({"weights": "tiny@2"}, "weights_revision"),
    ],
)
def test_an_engine_that_does_not_fit_is_refused_at_the_handshake_by_the_field(
    programs: Programs, changed: dict[str, Any], field: str
) -> None:
    stated = {"block_tokens": 16, "dtype": DTYPE, "layers": 4, "head_dim": 32, "weights": "tiny@1", **changed}
    config = stated_config(str(programs.decode.model), None)
    weights = identity_of(stated.pop("weights"), config, {}, quantization="", model_len=0)
    group = Group("kv", GroupKind.FULL_ATTENTION, blocks=8, kv_heads=2, total_kv_heads=2, **stated)
    nbytes = 2 * 2 * group.block_tokens * group.head_dim * (4 if group.dtype == DTYPE else 2)
    layout = uniform_layout(group, nbytes)
    with Engine.launch(pool=layout, private_memory=True, weights_revision=weights) as engine:
        rank = Rank(engine.ticket, 0, [np.zeros(layout.total_bytes, np.uint8)])
        for number, port in enumerate((programs.vllm.lead_port, programs.prefill.lead_port)):
            wanted = content(prompt_of(16, 1))
            engine.reserve([[0]], wanted, transfer_key=room_key(b"", number), source_address=f"127.0.0.1:{port}")
            failed = None
            while failed is None:
                failed = next((event for event in engine.poll(1.0) if isinstance(event, Failed)), None)
            assert field in failed.message, failed
        rank.close()
