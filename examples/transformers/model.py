"""Makes a Llama with random weights, small enough for any processor, and its greedy tokens."""

from typing import Any

import torch

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

VOCAB = 512


def make_model(seed: int = 0) -> Any:
    """Returns a model with the same weights in every process."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def new_cache(model: Any) -> Any:
    """Returns an empty KV cache."""
    return DynamicCache(config=model.config)


@torch.no_grad()
def compute(model: Any, cache: Any, ids: list[int]) -> int:
    """Computes these tokens after those in the cache. Returns the most likely next token."""
    logits = model(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits
    return int(logits[0, -1].argmax())


def decode(model: Any, cache: Any, first: int, count: int) -> list[int]:
    """Returns `count` greedy tokens; `first` is the first of them."""
    tokens = [first]
    while len(tokens) < count:
        tokens.append(compute(model, cache, tokens[-1:]))
    return tokens
