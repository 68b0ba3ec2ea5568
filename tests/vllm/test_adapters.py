"""Engines that compute with adapters, in many small steps. test_identity.py has the tests without engines."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.vllm.engines import DATA_PATHS, PREFILL, WORKER, Adapter, Engines, Pair, prompt_of, wait_until

RANK, HIDDEN, LAYERS = 8, 256, 4
"""Sizes of the adapters, and of the model of `write_model`."""


@pytest.fixture(scope="module", params=DATA_PATHS)
def engines_with_adapters(request: pytest.FixtureRequest, engines: Engines) -> Iterator[Pair]:
    more = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 2, "max_num_batched_tokens": 24}
    with closing(Pair(engines, more=more, data_paths=[request.param])) as pair:
        yield pair


@pytest.fixture
def adapted(engines_with_adapters: Pair) -> Iterator[Pair]:
    engines_with_adapters.start()
    yield engines_with_adapters
    engines_with_adapters.at_rest()


def write_adapter(folder: Path, seed: int) -> str:
    """Writes an adapter whose weights are large enough to change tokens."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    torch.manual_seed(seed)
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{half}.weight": torch.randn(shape) / 4
        for layer in range(LAYERS)
        for half, shape in (("A", (RANK, HIDDEN)), ("B", (HIDDEN, RANK)))
    }
    save_file(weights, folder / "adapter_model.safetensors")
    return str(folder)


def expected_with(pair: Pair, prompt: list[int], adapter: Adapter) -> list[int]:
    """Returns the tokens of P alone with this adapter, which then forgets the prompt."""
    tokens = pair.p.ask(prompt, adapter=adapter).tokens
    assert pair.p.forgets()
    return tokens


def test_a_pull_with_its_adapter_gives_the_same_tokens_and_with_another_it_fails(adapted: Pair, tmp_path: Path) -> None:
    prompt, elsewhere = prompt_of(200, seed=400), tmp_path / "elsewhere"
    adapter, other = (1, write_adapter(tmp_path / "a", 1)), (2, write_adapter(tmp_path / "b", 2))
    same = (3, write_adapter(elsewhere, 1))
    expected, before = expected_with(adapted, prompt, adapter), adapted.d.counts().get("received", 0)
    assert expected not in (adapted.expected(prompt), expected_with(adapted, prompt, other))
    params = adapted.prefilled(prompt, adapter=adapter)
    assert adapted.d.ask(prompt, params).failed
    assert adapted.d.ask(prompt, params, adapter=other).failed
    assert adapted.d.ask(prompt, params, adapter=same).tokens == expected
    assert adapted.d.counts()["received"] - before == 1


def test_what_was_computed_while_its_adapter_was_replaced_is_not_handed_over(adapted: Pair, tmp_path: Path) -> None:
    prompt, first, second = (
        prompt_of(1900, seed=401),
        write_adapter(tmp_path / "a", 1),
        write_adapter(tmp_path / "b", 2),
    )
    before = adapted.p.counts().get("busy_steps", 0)
    line = adapted.p.begin(prompt, PREFILL, 1, adapter=(4, first))
    wait_until(lambda: adapted.p.counts()["busy_steps"] > before)
    (worker,) = adapted.p.tree(WORKER)
    os.kill(worker, signal.SIGSTOP)
    try:
        load = adapted.p.begin_load((4, second))
    finally:
        os.kill(worker, signal.SIGCONT)
    answer = adapted.p.answer(line)
    assert (len(answer.tokens), answer.params) == (1, None)
    assert not adapted.p.answer(load).failed
    assert adapted.p.ask(prompt, PREFILL, 1, adapter=(5, first)).params is None
