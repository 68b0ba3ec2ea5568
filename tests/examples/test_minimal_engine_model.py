"""The minimal engine's model: moved KV gives the same tokens because the model gives the same bits.

Pools start as NaN, so that any read of an unwritten slot shows in the logits. Logits are compared bit by bit, except
with the plain forward pass below.
"""

import hashlib
import math
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from examples.minimal_engine.model import EOS_ID, VOCAB_TOKENS, MinimalModel, ModelConfig, decode, encode, greedy_token
from examples.minimal_engine.paged import BlockManager

ROOT = Path(__file__).parents[2]
BLOCK_TOKENS = 16
PRINTABLE = slice(ord(" "), ord("~") + 1)
WORDS = ("the", "cache", "holds", "keys", "and", "values", "of", "every", "token", "so", "far")
Pool = list[Tensor]  # one tensor per layer


@pytest.fixture(scope="module")
def model() -> MinimalModel:
    return MinimalModel()


@pytest.fixture(scope="module", params=[0, 20], ids=["all", "window"])
def either(request: pytest.FixtureRequest) -> MinimalModel:
    """Returns a model without windows, or one with a window of partial blocks and tiles in every second layer."""
    return MinimalModel(ModelConfig(window_tokens=request.param))


def empty_pool(model: MinimalModel, num_blocks: int, block_tokens: int) -> Pool:
    shape = model.config.kv_shape(num_blocks, block_tokens)
    return [torch.full(shape, math.nan) for _ in range(model.config.layers)]


def text_prompt(rng: random.Random, size_bytes: int) -> list[int]:
    text = " ".join(rng.choice(WORDS) for _ in range(size_bytes))
    return encode(text[:size_bytes])


class Session:
    """One request: a prompt's KV in blocks of its own, and the tokens decoded from it."""

    def __init__(self, model: MinimalModel, prompt: list[int], table: list[int], kv: Pool) -> None:
        self.model, self.table, self.kv = model, table, kv
        self.token_ids = list(prompt)
        self.history: list[Tensor] = []

    @classmethod
    def alone(cls, model: MinimalModel, prompt: list[int]) -> "Session":
        """Returns a request in a pool of its own, with room for 32 more tokens."""
        num_blocks = -(-(len(prompt) + 32) // BLOCK_TOKENS)
        kv = empty_pool(model, num_blocks, BLOCK_TOKENS)
        return cls(model, prompt, list(range(num_blocks)), kv)

    def prefill(self) -> Tensor:
        return self.model.forward(self.token_ids, 0, self.table, self.kv)

    def decode(self, logits: Tensor, tokens: int) -> None:
        """Appends `tokens` greedy tokens, beginning with the logits of the last token."""
        self.history = [logits]
        for _ in range(tokens):
            self.token_ids.append(greedy_token(self.history[-1]))
            position = len(self.token_ids) - 1
            logits = self.model.forward(self.token_ids[-1:], position, self.table, self.kv)
            self.history.append(logits)

    def assert_equal(self, other: "Session") -> None:
        assert self.token_ids == other.token_ids
        assert torch.equal(torch.stack(self.history), torch.stack(other.history))


def plain_forward(model: MinimalModel, token_ids: list[int]) -> Tensor:
    """Returns the logits of all positions, [tokens, VOCAB_TOKENS], by torch's own attention over whole tensors."""
    c = model.config
    exponents = torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim
    angles = torch.arange(len(token_ids))[:, None, None] / c.rope_base**exponents
    turn = torch.polar(torch.ones_like(angles), angles)

    def rotate(x: Tensor) -> Tensor:
        turned = torch.complex(*x.chunk(2, dim=-1)) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    norm = partial(rms_norm, normalized_shape=[c.hidden_dim], eps=1e-6)
    hidden = model.embedding[torch.tensor(token_ids)]
    ages = torch.arange(len(token_ids))[:, None] - torch.arange(len(token_ids))
    for number, weights in enumerate(model.layers):
        newer_than = c.window_of(number) or len(token_ids)
        heads = (norm(hidden) @ weights.qkv).view(len(token_ids), -1, c.head_dim)
        q = rotate(heads[:, : c.query_heads])
        k = rotate(heads[:, c.query_heads : -c.kv_heads]).float().double()
        v = heads[:, -c.kv_heads :].float().double()
        mixed = scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=(ages >= 0) & (ages < newer_than),
            scale=c.score_deviation / math.sqrt(c.head_dim),
            enable_gqa=True,
        )
        hidden = hidden + mixed[0].transpose(0, 1).flatten(1) @ weights.attention_out
        gate, up = (norm(hidden) @ weights.gate_up).chunk(2, dim=-1)
        hidden = hidden + (silu(gate) * up) @ weights.down
    return norm(hidden) @ model.head


# ---- the model


def test_logits_equal_a_plain_forward_pass_far_below_the_margin(either: MinimalModel) -> None:
    rng = random.Random(1)
    noise, margin = 0.0, math.inf
    for size_bytes in (1, 15, 16, 200):
        prompt = text_prompt(rng, size_bytes)
        session = Session.alone(either, prompt)
        session.decode(session.prefill(), 16)
        paged = torch.stack(session.history)[:, PRINTABLE]
        plain = plain_forward(either, session.token_ids)[len(prompt) - 1 :, PRINTABLE]
        noise = max(noise, float((paged - plain).abs().max()))
        best, second = paged.topk(2).values.unbind(dim=-1)
        margin = min(margin, float((best - second).min()))
    assert noise < 1e-7
    assert margin > 1000 * noise


def test_a_prompt_in_chunks_or_token_by_token_gives_the_same_bits(either: MinimalModel) -> None:
    prompt = text_prompt(random.Random(2), 50)
    whole = Session.alone(either, prompt)
    expected = whole.prefill()
    for chunk_tokens in (1, 7, 33):
        chunked = Session.alone(either, prompt)
        logits = torch.empty(0)
        for start in range(0, len(prompt), chunk_tokens):
            chunk = prompt[start : start + chunk_tokens]
            logits = either.forward(chunk, start, chunked.table, chunked.kv)
        assert torch.equal(logits, expected)
        for layer, expected_layer in zip(chunked.kv, whole.kv, strict=True):
            assert torch.equal(layer.view(torch.int32), expected_layer.view(torch.int32))


@pytest.mark.parametrize("block_tokens", [5, 8, 16, 64])
def test_which_blocks_of_which_size_does_not_matter(either: MinimalModel, block_tokens: int) -> None:
    prompt = text_prompt(random.Random(3), 70)
    plain = Session.alone(either, prompt)
    plain.decode(plain.prefill(), 8)
    table = list(range(40))
    random.Random(block_tokens).shuffle(table)
    shuffled = Session(either, prompt, table, empty_pool(either, 40, block_tokens))
    shuffled.decode(shuffled.prefill(), 8)
    shuffled.assert_equal(plain)


def test_decode_from_copied_blocks_equals_one_engine_doing_both(model: MinimalModel) -> None:
    prompt = text_prompt(random.Random(4), 60)
    source = Session.alone(model, prompt)
    logits = source.prefill()
    target = Session(model, prompt, [9, 2, 11, 0, 5, 7], empty_pool(model, 12, BLOCK_TOKENS))
    used = -(-len(prompt) // BLOCK_TOKENS)
    for source_layer, target_layer in zip(source.kv, target.kv, strict=True):
        target_layer[target.table[:used]] = source_layer[source.table[:used]]
    source.decode(logits, 24)
    target.decode(logits, 24)
    target.assert_equal(source)


def test_forward_writes_the_slots_of_its_own_tokens_only(model: MinimalModel) -> None:
    session = Session.alone(model, text_prompt(random.Random(5), 40))
    session.prefill()
    before = [layer.clone() for layer in session.kv]
    model.forward(encode("next")[1:], 41, session.table, session.kv)
    for layer, old in zip(session.kv, before, strict=True):
        changed = (layer.view(torch.int32) != old.view(torch.int32)).any(-1).any(-1).any(1)
        assert changed.nonzero().tolist() == [[2, slot] for slot in (9, 10, 11, 12)]


def test_a_wrong_token_slot_in_any_used_block_changes_the_logits(model: MinimalModel) -> None:
    prompt = text_prompt(random.Random(6), 40)
    session = Session.alone(model, prompt)
    session.prefill()

    def last_logits() -> Tensor:
        return model.forward(prompt[-1:], len(prompt) - 1, session.table, session.kv)

    expected = last_logits()
    for layer in session.kv:
        for block, slot in ((0, 0), (1, 5), (2, 7)):
            for k_or_v in (0, 1):
                region = layer[block, k_or_v, slot].view(torch.uint8)
                region ^= 0x10
                assert not torch.equal(last_logits(), expected)
                region ^= 0x10
    assert torch.equal(last_logits(), expected)


def test_different_prompts_continue_differently_and_without_a_loop(model: MinimalModel) -> None:
    rng = random.Random(9)
    prompts = [text_prompt(rng, size_bytes) for size_bytes in (20, 40, 60, 80)]
    # The same prompts, with one bit of their first byte changed.
    prompts += [[prompt[0], prompt[1] ^ 1, *prompt[2:]] for prompt in prompts]
    sessions = [Session.alone(model, prompt) for prompt in prompts]
    for session in sessions:
        session.decode(session.prefill(), 12)
    texts = [decode(session.token_ids[-12:]) for session in sessions]
    assert len(set(texts)) == len(prompts)
    assert all(len(set(text)) >= 6 and text.isprintable() for text in texts)


def test_text_survives_the_tokenizer() -> None:
    assert decode([*encode("Grüße, 世界"), EOS_ID]) == "Grüße, 世界"


def test_weights_and_block_bytes_are_the_same_or_have_a_new_revision(model: MinimalModel) -> None:
    """If this fails, engines of two versions would wrongly trust each other's KV. Raise the number in _REVISION_DOMAIN,
    then write both new digests here.
    """
    values = [tensor for layer in model.layers for tensor in vars(layer).values()]
    digest = hashlib.sha256()
    for tensor in (model.embedding, *values, model.head):
        digest.update(tensor.numpy().tobytes())
    assert model.config.block_bytes(BLOCK_TOKENS) == 16 * 1024
    assert model.weights_revision[:16] == "393fba709303ee83"
    assert digest.hexdigest()[:16] == "d7f504dfbe78d62a"
    others = (ModelConfig(seed=2), ModelConfig(window_tokens=32), ModelConfig(window_tokens=33))
    assert len({model.weights_revision, *(config.weights_revision for config in others)}) == 4


def test_layers_whose_kv_comes_just_in_time_give_the_same_bits_unwritten(model: MinimalModel) -> None:
    """A decode side reads layers as they are pushed to it; before that, each layer is NaN."""
    prompt = text_prompt(random.Random(7), 50)
    source = Session.alone(model, prompt)
    expected = source.prefill()
    last = len(prompt) - 1
    kv = empty_pool(model, len(source.table), BLOCK_TOKENS)
    run = model.begin(prompt[last:], last, source.table, kv, writes=False)
    with pytest.raises(ValueError, match="0 of 6 layers"):
        model.logits(run)
    for layer, came in zip(kv, source.kv, strict=True):
        layer.copy_(came)
        before = layer.clone()
        model.next_layer(run)
        assert torch.equal(layer.nan_to_num(), before.nan_to_num())
    assert torch.equal(model.logits(run), expected)


def test_a_layer_is_complete_once_it_is_computed(model: MinimalModel) -> None:
    prompt = text_prompt(random.Random(8), 40)
    whole = Session.alone(model, prompt)
    whole.prefill()
    kv = empty_pool(model, len(whole.table), BLOCK_TOKENS)
    run = model.begin(prompt, 0, whole.table, kv)
    for done in range(1, len(kv) + 1):
        model.next_layer(run)
        for number, (layer, expected) in enumerate(zip(kv, whole.kv, strict=True)):
            assert number >= done or torch.equal(layer.nan_to_num(), expected.nan_to_num())
        assert all(layer.isnan().all() for layer in kv[done:])


def test_forward_and_config_refuse_what_does_not_fit(model: MinimalModel) -> None:
    pool = empty_pool(model, 1, BLOCK_TOKENS)
    for token_ids, start, kv, message in (
        ([], 0, pool, "0 tokens to compute"),
        ([1], -1, pool, "from position -1"),
        ([VOCAB_TOKENS], 0, pool, "outside 0..257"),
        ([1], BLOCK_TOKENS, pool, "do not reach to position 16"),
        ([1], 0, pool[1:], "KV of 5 layers"),
        ([1], 0, [*pool[1:], pool[0].half()], "not float32"),
        ([1], 0, [*pool[1:], pool[0][..., :16]], "not float32"),
    ):
        with pytest.raises(ValueError, match=message):
            model.forward(token_ids, start, [0], kv)
    with pytest.raises(ValueError, match="8 query heads over 3"):
        ModelConfig(kv_heads=3)
    with pytest.raises(ValueError, match="even head_dim"):
        ModelConfig(head_dim=31)
    for config in ({"window_tokens": -1}, {"window_tokens": 8, "layers": 5}):
        with pytest.raises(ValueError, match="layers has a window"):
            ModelConfig(**config)
    with pytest.raises(ValueError, match="0 blocks of 16"):
        BlockManager(0, 16)


def test_importing_the_package_does_not_import_torch() -> None:
    program = "import sys, examples.minimal_engine.paged; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


# ---- model and blocks together


def test_a_prefill_that_skips_a_cached_prefix_gives_the_same_tokens(either: MinimalModel) -> None:
    rng = random.Random(10)
    for size_bytes in [600, *(rng.randrange(1, 80) for _ in range(19))]:
        prompt = text_prompt(rng, size_bytes)
        manager = BlockManager(100, BLOCK_TOKENS)
        pool = empty_pool(either, 100, BLOCK_TOKENS)
        first, _ = manager.allocate(prompt)
        manager.extend(first, len(prompt) + 3)
        full = Session(either, prompt, first, pool)
        full.decode(full.prefill(), 3)
        known_tokens = rng.randrange(len(prompt) + 1)
        manager.register(first, prompt[:known_tokens])
        table, cached_tokens = manager.allocate(prompt)
        manager.extend(table, len(prompt) + 3)
        assert cached_tokens == min(known_tokens, len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        skipping = Session(either, prompt, table, pool)
        logits = either.forward(prompt[cached_tokens:], cached_tokens, table, pool)
        skipping.decode(logits, 3)
        skipping.assert_equal(full)
