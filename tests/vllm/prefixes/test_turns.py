"""The next turn of a conversation, if its text differs from what was generated, or decode prefilled it."""

from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.metrics.stats import PrefillStats

from tests.vllm.cores import PROMPT, Core, Cores, request_of
from tests.vllm.engines import BLOCK_TOKENS, PREFILL, Pair, prompt_of, wait_until

ALONE = {"do_remote_decode": False, "do_remote_prefill": False}
"""Params of a request that decode is to prefill itself."""


def answering(core: Core, name: str, params: Any, **fields: Any) -> dict[str, Any]:
    """Prefills and answers a turn here. Returns the answer's params."""
    request = request_of(name, params, **fields)
    core.hooks.arrived(request)
    blocks = core.allocate()
    core.hooks.allocated(request, (blocks,), core.hooks.match(request, 0) or 0)
    return core.left(request, blocks)


def test_of_a_prompt_that_goes_on_otherwise_vllm_computes_what_differs(cores: Cores) -> None:
    p, d = cores
    other = [*PROMPT[:20], *PROMPT[:20]]
    stats = PrefillStats()
    request = request_of(
        "d", p.prefilled("p"), prompt_token_ids=other, all_token_ids=other, num_prompt_tokens=40, prefill_stats=stats
    )
    request.num_computed_tokens = len(PROMPT)  # vLLM sets this while the request waits
    blocks = d.begin(request)
    wait_until(lambda: d.step() and d.told.loaded == {"d"})
    assert not d.told.failed
    assert (request.num_computed_tokens, stats.num_cached_tokens, stats.num_external_cached_tokens) == (16, 16, 16)
    for number, layer in enumerate(d.memory.values()):
        assert (layer[blocks[:1]] == 7 + number).all()
        assert not (layer[blocks[1:]] == 7 + number).any()
    counted = d.side.stats.take()
    assert counted is not None
    assert (counted.data["received"], counted.data["received_tokens"]) == (1, 16)


def test_a_turn_that_decode_prefilled_itself_is_offered_where_the_router_speaks_of_it(in_order: Cores) -> None:
    p, d = in_order
    params = answering(d, "d", ALONE)
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    assert answering(d, "other", {}) == {}
    wait_until(lambda: d.step() and d.used() == 3)
    turn = request_of("p", {**PREFILL, **params})
    p.hooks.arrived(turn)
    assert not p.hooks.match(turn, 0), "a short history is computed"


@pytest.mark.parametrize(
    ("name", "kind", "offers"),
    [
        ("chatcmpl-x-0a1b2c3d", RequestOutputKind.DELTA, False),
        ("cmpl-x-0-0a1b2c3d", RequestOutputKind.DELTA, False),
        ("cmpl-x-0-0a1b2c3d", RequestOutputKind.FINAL_ONLY, True),
        ("x", RequestOutputKind.DELTA, True),
    ],
)
def test_what_no_router_would_hear_of_is_not_offered(
    in_order: Cores, name: str, kind: RequestOutputKind, offers: bool
) -> None:
    _, d = in_order
    sampling = SamplingParams(max_tokens=1, output_kind=kind)
    assert bool(answering(d, name, ALONE, sampling_params=sampling)) is offers
    assert d.used() == (3 if offers else 0)


@pytest.mark.parametrize("alone", [False, True], ids=["prefilled elsewhere", "prefilled by decode"])
@pytest.mark.parametrize("same", [0, 3])
def test_a_turn_whose_text_differs_takes_what_is_the_same(pair: Pair, same: int, alone: bool) -> None:
    """The next turn replaces the answer's tokens from the first or the fourth one on."""
    prompt = prompt_of(5 * BLOCK_TOKENS - 4, seed=950 + same + alone)
    answer = pair.d.ask(prompt, ALONE) if alone else pair.pull(prompt)
    turn = [*prompt, *answer.tokens[:same], *prompt_of(100, seed=960 + same)]
    expected = pair.d.ask(turn, salt="apart").tokens
    wait_until(pair.p.rests)  # it has nothing of the prompt
    before = pair.p.counts()
    relayed = pair.p.ask(turn, {**PREFILL, **answer.params}, 1)
    assert not relayed.failed
    after = pair.p.counts()
    assert after["received_tokens"] - before.get("received_tokens", 0) == (len(prompt) + same) // 16 * 16
    assert after.get("lost", 0) == before.get("lost", 0)
    assert pair.d.ask(turn, relayed.params).tokens == expected
