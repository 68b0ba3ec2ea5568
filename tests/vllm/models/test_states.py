"""States (Mamba 2, gated delta nets), alone or beside attention: prefill stops before the last token of the prompt,
decode continues from its state, and the tokens are those of one engine.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.counts import moved, moved_since, received
from tests.vllm.engines import (
    CHUNK_TOKENS,
    MAX_TOKENS,
    START_S,
    VOCABULARY,
    Engines,
    Pair,
    prompt_of,
    wait_until,
)

pytestmark = pytest.mark.timeout(START_S)

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "num_hidden_layers": 4, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.08, "tie_word_embeddings": False,
}  # fmt: skip
ATTENTION: dict[str, Any] = {
    "intermediate_size": 688, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_chunk_size": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A model, and how vLLM runs it here."""

    name: str
    block_tokens: int
    """Block size of its attention, in tokens; any number for a model without attention."""
    attention_bytes: int
    """Size of one attention block of all layers, in bytes."""
    state_bytes: int
    """Size of the states of all layers, in bytes."""
    dtype: str = "float32"
    prefix_caching: bool = False
    shortest: int = 1
    """Minimum tokens of a prompt. Fewer crash vLLM's kernels for processors, with a connector or without."""
    path: str = "cma"
    """Data path."""

    @property
    def lengths(self) -> list[int]:
        """Lengths of prompts: the last token has no block at decode, or is the first, second or last of a block."""
        block = self.block_tokens
        return [self.shortest + 1, block, block + 1, block + 2, 2 * max(block, CHUNK_TOKENS) + 77]

    def nbytes(self, tokens: int) -> int:
        """Returns the number of bytes that move for a prompt of this many tokens."""
        return -(-(tokens - 1) // self.block_tokens) * self.attention_bytes + self.state_bytes


MODELS = {
    "mamba": Model("mamba", 64, 0, 4 * 39_296, path="nixl"),
    "falcon": Model("falcon", 32, 4 * 32_768, 4 * 19_840),
    "granite": Model("granite", 64, 65_536, 3 * 39_296),
    "qwen": Model("qwen", 544, 278_528, 3 * 268_288, "bfloat16", shortest=2),
    "qwen-cached": Model("qwen", 544, 278_528, 3 * 268_288, "bfloat16", prefix_caching=True, shortest=2),
}


def write_model(folder: Path, name: str) -> None:
    """Writes a Mamba 2, a Falcon H1, a Granite 4 or a Qwen 3.5 with random weights."""
    import torch
    import transformers as hf

    torch.manual_seed(0)
    made: Any
    match name:
        case "mamba":
            made = hf.Mamba2ForCausalLM(
                hf.Mamba2Config(**COMMON, state_size=16, num_heads=16, head_dim=32, n_groups=1, chunk_size=64)
            )
        case "falcon":
            made = hf.FalconH1ForCausalLM(
                hf.FalconH1Config(**COMMON, **ATTENTION, **MAMBA, mamba_d_ssm=256, mamba_n_heads=8)
            )
        case "granite":
            layers = ["mamba", "attention", "mamba", "mamba"]
            more = {**COMMON, **ATTENTION, **MAMBA, "mamba_n_heads": 16, "position_embedding_type": "rope"}
            more |= {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 512}
            made = hf.GraniteMoeHybridForCausalLM(hf.GraniteMoeHybridConfig(layer_types=layers, **more))
        case _:
            layers = ["linear_attention"] * 3 + ["full_attention"]
            more = {**COMMON, **ATTENTION, "head_dim": 32, "linear_value_head_dim": 128}
            more |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128}
            made = hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(layer_types=layers, **more))
    made.save_pretrained(folder)


def arguments(engines: Engines, model: Model) -> dict[str, Any]:
    """Returns the arguments of vLLM, after it wrote the model's folder."""
    folder = engines.folder / f"states-{model.name}"
    if not folder.exists():
        write_model(folder, model.name)
    return {"model": str(folder), "dtype": model.dtype, "enable_prefix_caching": model.prefix_caching}


@dataclass(frozen=True)
class States:
    """Engines with such a model."""

    model: Model
    pair: Pair

    def asked(self, start: list[int]) -> tuple[list[int], list[int]]:
        """Returns a prompt of one more token, and the tokens that one engine gives for it. In bfloat16 vLLM's prefill
        and decode kernels do not agree, and an engine that takes a state decodes the last token of its prompt. So the
        prompt then ends with a token that the other engine decoded.
        """
        if self.model.dtype == "float32":
            prompt = [*start, 77]
            return prompt, self.pair.expected(prompt)
        decoded, *expected = self.pair.p.ask(start, None, 1 + MAX_TOKENS).tokens
        assert self.pair.p.forgets()
        return [*start, decoded], expected

    def clear(self, tokens: int, seed: int) -> tuple[list[int], list[int]]:
        """Returns what `asked` does, of a prompt for which both engines alone give these tokens: no two logits are so
        close that the rounding of other numbers of ranks decides between them.
        """
        while True:
            prompt, expected = self.asked(prompt_of(tokens, seed=seed))
            several = self.pair.d.ask(prompt, n=2)
            alone = [self.pair.d.ask(prompt).tokens, several.tokens, *several.others]
            assert self.pair.d.forgets()
            if alone == [expected] * 3:
                return prompt, expected
            seed += 100


@pytest.fixture(scope="module", params=MODELS)
def states(request: pytest.FixtureRequest, engines: Engines) -> Iterator[States]:
    model = MODELS[request.param]
    more = arguments(engines, model)
    with closing(Pair(engines, more=more, data_paths=[model.path], layers_per_part=1, offer_ttl_s=60.0)) as pair:
        pair.start()
        yield States(model, pair)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_decode_goes_on_from_the_state_before_the_last_token_as_one_engine_does(states: States, mode: str) -> None:
    pair = states.pair
    for length in states.model.lengths:
        prompt, expected = states.asked(prompt_of(length - 1, seed=21))
        before, known = received(pair.d), moved(pair.d)
        answer = pair.pull(prompt) if mode == "pull" else pair.push(prompt)
        assert answer.tokens == expected, (length, answer)
        assert received(pair.d) - before == length - 1
        assert moved_since(pair.d, known) == [states.model.nbytes(length)], length
        pair.at_rest()


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_prompt_of_one_token_is_computed_by_decode_alone(states: States, mode: str) -> None:
    pair, prompt = states.pair, [77]
    if states.model.shortest > 1:
        pytest.skip("vLLM cannot compute it")
    expected, before = pair.expected(prompt), received(pair.d)
    answer = pair.pull(prompt) if mode == "pull" else pair.push(prompt)
    assert answer.tokens == expected
    assert received(pair.d) == before
    pair.at_rest()


def test_states_of_requests_at_once_are_kept_apart(states: States) -> None:
    """Blocks of attention become blocks of a state next, and are zeroed in between."""
    pair = states.pair
    asked = [states.asked(prompt_of(40 + 37 * number, seed=70 + number)) for number in range(6)]
    prompts, expected = [prompt for prompt, _ in asked], [tokens for _, tokens in asked]
    before = received(pair.d)
    params = [pair.prefilled(prompt) for prompt in prompts]
    lines = [pair.d.begin(prompt, of) for prompt, of in zip(prompts, params, strict=True)]
    own = pair.d.begin(prompts[0])
    assert [pair.d.answer(line).tokens for line in lines] == expected
    assert pair.d.answer(own).tokens == expected[0]
    assert received(pair.d) - before == sum(map(len, prompts)) - len(prompts)
    pair.at_rest()


@pytest.mark.parametrize("more", [1, 2, 40])
def test_the_next_turn_goes_on_from_the_state_of_the_engine_that_decoded(states: States, more: int) -> None:
    """A turn of one token more than was computed leaves nothing for prefill to compute, so it begins anew."""
    pair = states.pair
    prompt, expected = states.asked(prompt_of(states.model.block_tokens + 70, seed=60))
    answer = pair.pull(prompt)
    assert answer.tokens == expected
    if states.model.dtype == "float32":
        turn = [*prompt, *expected, *prompt_of(more - 1, seed=61)]
        expected_then = pair.expected(turn)
    else:  # the one engine decodes all of the turn
        decoded = pair.p.ask(prompt[:-1], None, 1 + 2 * MAX_TOKENS + more - 1).tokens
        turn = [*prompt[:-1], *decoded[: 1 + MAX_TOKENS + more - 1]]
        expected_then = decoded[1 + MAX_TOKENS + more - 1 :]
    wait_until(pair.p.rests)
    before = pair.p.counts().get("external_hits", 0)
    relayed = pair.p.ask(turn, answer.params, 1)
    history = len(prompt) + len(expected) - 1  # the last token of an answer was never computed
    assert len(turn) == history + more
    assert pair.p.counts().get("external_hits", 0) - before == (history if more > 1 else 0)
    wait_until(pair.d.rests)
    before = received(pair.d)
    tokens = pair.d.ask(turn, relayed.params).tokens
    assert received(pair.d) - before == len(turn) - 1
    if states.model.dtype == "float32" or more == 2:  # otherwise prefill computes what the one engine decodes
        assert tokens == expected_then
    pair.at_rest()


def test_what_decode_has_of_a_prompt_does_not_come_again_but_its_state(states: States) -> None:
    """An engine that caches states has the state of a prefix that ends with a block."""
    pair, model = states.pair, states.model
    if not model.prefix_caching:
        pytest.skip("vLLM keeps no states here")
    shared = prompt_of(model.block_tokens, seed=40)
    for start, hits in ((shared, len(shared)), ([*shared, *prompt_of(69, seed=41)], 69)):
        prompt, expected = states.asked(start)
        before, known = pair.d.counts().get("external_hits", 0), moved(pair.d)
        assert pair.pull(prompt).tokens == expected
        assert pair.d.counts()["external_hits"] - before == hits
        assert moved_since(pair.d, known) == [model.attention_bytes + model.state_bytes], "one block in either case"
    pair.at_rest()


def test_hand_overs_that_nobody_comes_for_are_taken_back_and_what_is_lost_is_computed(engines: Engines) -> None:
    model = MODELS["falcon"]
    more = {**arguments(engines, model), "max_model_len": 512, "num_gpu_blocks_override": 40}
    with closing(Pair(engines, more=more, ttl_s=600.0, firm_ttl_s=0.3)) as pair:
        pair.on_loss["D"] = "recompute"
        pair.start()
        for seed in range(5):
            pair.prefilled(prompt_of(10 * model.block_tokens, seed=80 + seed))  # its client hangs up: nobody comes
        prompt = prompt_of(10 * model.block_tokens, seed=90)
        answer = pair.pull(prompt)
        assert answer.tokens == pair.p.ask(prompt).tokens
        assert pair.p.counts().get("preempted", 0) == 0
        params, before = pair.prefilled(prompt), received(pair.d)
        pair.p.let_go()
        assert pair.d.ask(prompt, params).tokens == answer.tokens
        assert received(pair.d) == before
        pair.at_rest()


ENGINES: dict[str, dict[str, dict[str, Any]]] = {
    "two-ranks-each": {name: {"tensor_parallel_size": 2} for name in "PD"},
    "cached-to-shorter": {"P": {"enable_prefix_caching": True}, "D": {"max_model_len": 1024}},
}


@pytest.mark.parametrize("each", ENGINES)
def test_states_move_between_equal_ranks_whatever_is_cached_and_however_long_prompts_are(
    engines: Engines, each: str
) -> None:
    model = MODELS["qwen"]
    with closing(Pair(engines, more=arguments(engines, model), each=ENGINES[each])) as pair:
        pair.start()
        for length in (model.block_tokens + 1, 700):
            prompt, expected = States(model, pair).asked(prompt_of(length - 1, seed=97))
            before = received(pair.d)
            assert pair.pull(prompt).tokens == expected
            assert pair.push(prompt).tokens == expected
            assert received(pair.d) - before == 2 * (length - 1)
            pair.at_rest()


@pytest.mark.parametrize(("name", "splits"), [("falcon", "PD"), ("falcon", "DP"), ("qwen", "PD"), ("qwen", "DP")])
def test_states_of_engines_with_other_numbers_of_ranks_give_the_tokens_of_one(
    engines: Engines, name: str, splits: str
) -> None:
    """One rank and two. For a single group of heads both ranks have the same inputs, which come from either."""
    model = MODELS[name]
    more, each = arguments(engines, model), {splits[1]: {"tensor_parallel_size": 2}}
    with closing(Pair(engines, more=more, each=each, data_paths=["cma"], layers_per_part=1)) as pair:
        pair.start()
        for length in (model.block_tokens + 1, 700):
            prompt, expected = States(model, pair).clear(length - 1, seed=97)
            before = received(pair.d)
            assert pair.pull(prompt).tokens == expected
            pair.at_rest()
            assert pair.push(prompt).tokens == expected
            assert received(pair.d) - before == 2 * (length - 1)
            pair.at_rest()
