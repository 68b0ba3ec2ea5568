"""Prompts of the storm, and the bytes that their KV has to have: a function of the tokens up to each block's end."""

import random
from array import array
from hashlib import sha256, shake_256

BLOCK_TOKENS = 16
LAYERS, KV_HEADS, HEAD_DIM = 4, 2, 32
LAYER_BYTES = 2 * BLOCK_TOKENS * KV_HEADS * HEAD_DIM * 2
"""Bytes of a block in one layer: K and V, tokens, heads, elements, bytes of a float16."""
BLOCK_BYTES = LAYERS * LAYER_BYTES
POOL_BLOCKS = 512
POOL = (
    "--layers", str(LAYERS), "--kv-heads", str(KV_HEADS), "--head-dim", str(HEAD_DIM),
    "--block-tokens", str(BLOCK_TOKENS), "--blocks", str(POOL_BLOCKS),
)  # fmt: skip
"""Flags of the pools: 16 KiB a block, 8 MiB a pool."""
BLOCKS_MAX = 24
VOCABULARY = 50_000
FAMILIES = 6
"""Number of beginnings that prompts share."""


def prompt(chance: random.Random) -> list[int]:
    """Returns the token ids of a prompt: a beginning that others share, then tokens of its own."""
    family = random.Random(chance.randrange(FAMILIES))  # noqa: S311 - the same in every run
    half = BLOCKS_MAX // 2
    shared = family.choices(range(VOCABULARY), k=chance.randrange(1, half) * BLOCK_TOKENS)
    return shared + chance.choices(range(VOCABULARY), k=chance.randrange(1, half * BLOCK_TOKENS))


def block_count(token_ids: list[int]) -> int:
    """Returns how many blocks a prompt fills, the last one perhaps in part."""
    return -(-len(token_ids) // BLOCK_TOKENS)


def kv(token_ids: list[int]) -> list[bytes]:
    """Returns the bytes of each block of a prompt. They depend on all tokens before the block's end."""
    so_far, blocks = sha256(), list[bytes]()
    for begin in range(0, len(token_ids), BLOCK_TOKENS):
        so_far.update(array("I", token_ids[begin : begin + BLOCK_TOKENS]).tobytes())
        blocks.append(shake_256(so_far.digest()).digest(BLOCK_BYTES))
    return blocks
