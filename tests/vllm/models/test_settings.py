"""Settings of vLLM that change the cache, or how it is computed, do not change the tokens."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.counts import received
from tests.vllm.engines import CHUNK_TOKENS, START_S, VOCABULARY, Engines, Pair, prompt_of

pytestmark = pytest.mark.timeout(START_S)

DRAFT = "draft"
SETTINGS: dict[str, dict[str, Any]] = {
    "fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3"},
    "fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2"},
    "ngram": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        }
    },
    "eagle": {"speculative_config": {"method": "eagle", "num_speculative_tokens": 2, "model": DRAFT}},
    "async_scheduling": {"async_scheduling": True},
}
CACHES = {"fp8_e4m3": "uint8", "fp8_e5m2": "uint8"}
"""Types in which vLLM keeps these caches. Engines compare which of the two it is as part of their weights."""
LENGTHS = [20, 3 * CHUNK_TOKENS + 77]


def write_draft(folder: Path) -> None:
    """Writes a draft of one layer with random weights, for the usual model."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=688, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, initializer_range=0.08,
    )  # fmt: skip
    layers = {
        name.removeprefix("model."): tensor.to(torch.bfloat16).contiguous()
        for name, tensor in LlamaForCausalLM(config).state_dict().items()
        if ".layers." in name and "input_layernorm" not in name
    }
    folder.mkdir()
    save_file({**layers, "fc.weight": 0.08 * torch.randn(256, 512).to(torch.bfloat16)}, folder / "model.safetensors")
    named = {**config.to_dict(), "architectures": ["EagleLlamaForCausalLM"], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(named))


@pytest.fixture(scope="module", params=list(SETTINGS))
def setting(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def pair(setting: str, engines: Engines) -> Iterator[Pair]:
    more = dict(SETTINGS[setting])
    if (speculative := more.get("speculative_config", {})).get("model") == DRAFT:
        write_draft(engines.folder / DRAFT)
        more["speculative_config"] = {**speculative, "model": str(engines.folder / DRAFT)}
    with closing(Pair(engines, more=more, layers_per_part=1)) as pair:
        pair.start()
        yield pair


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_what_came_gives_the_tokens_of_one_engine(pair: Pair, mode: str, length: int) -> None:
    prompt = prompt_of(length, seed=12)
    expected, before = pair.expected(prompt), received(pair.d)
    answer = pair.pull(prompt) if mode == "pull" else pair.push(prompt)
    assert answer.tokens == expected, answer
    assert received(pair.d) - before == length
    pair.at_rest()


def test_the_cache_is_of_the_type_that_was_set(pair: Pair, setting: str) -> None:
    for engine in (pair.p, pair.d):
        with engine.lead() as lead:
            groups = lead.capabilities().engine.pool.groups
        assert [group.dtype for group in groups] == [CACHES.get(setting, "bfloat16")]


def test_the_engine_that_decodes_drafts_tokens_where_that_is_set(pair: Pair, setting: str) -> None:
    prompt = prompt_of(LENGTHS[-1], seed=13)
    expected, before = pair.expected(prompt), pair.d.counts().get("draft_tokens", 0)
    assert pair.pull(prompt).tokens == expected
    drafted = pair.d.counts()["draft_tokens"] - before
    assert drafted > 0 if "speculative_config" in SETTINGS[setting] else drafted == 0
    pair.at_rest()
