"""Re-packs for the tests of the mover: what is posted, and the memory afterwards."""

from dataclasses import replace
from typing import Any

import numpy as np

from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.core.values.strips import Repack, Strip
from tests.datapath.movers import NBYTES, Held, Rank
from tests.datapath.peers import GUARD, Bytes, runs_of

BLOCK, HEADS, TOKENS, HEAD = 64 << 10, 8, 64, 64
"""Bytes of a block of the source, for keys and values; number of heads; number of tokens; bytes of a head."""


def places(*offsets: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(offsets, dtype=np.int64)


HEAD_OF_EACH = Strip(
    places(2 * HEAD, BLOCK + 2 * HEAD, 2 * BLOCK + 2 * HEAD),
    places(100_000, 7, 300_032),
    (2, TOKENS),
    (BLOCK // 2, HEADS * HEAD),
    (TOKENS * HEAD, HEAD),
    HEAD,
)
"""Strip that copies head 2 of three blocks, which lie side by side in the staging buffer, into smaller blocks."""
THREE = Repack((HEAD_OF_EACH,), 3 * BLOCK)
BLOCKS = runs_of((5 * BLOCK, 0, BLOCK), (BLOCK, BLOCK, BLOCK), (9 * BLOCK, 2 * BLOCK, BLOCK))


def repacked(source: Bytes) -> Bytes:
    """Returns the memory after the re-pack `THREE`."""
    staged = np.concatenate([source[at : at + BLOCK] for at in (5 * BLOCK, BLOCK, 9 * BLOCK)])
    memory = np.full(NBYTES, GUARD, dtype=np.uint8)
    runs = HEAD_OF_EACH.runs()
    for src, dst, nbytes in zip(runs.src.tolist(), runs.dst.tolist(), runs.nbytes.tolist(), strict=True):
        memory[dst : dst + nbytes] = staged[src : src + nbytes]
    return memory


def staging_rank(held: Held, room: int = 8, **options: Any) -> Rank:
    """Makes a rank with room for `room` blocks in its staging arena."""
    rank = Rank(lambda _: [held], staging_bytes=room * BLOCK, **options)
    rank.mover.connect("h", RankEndpoint(0), ["held"])
    rank.mapped()
    return rank


def stage(blocks: int) -> dict[str, Any]:
    """Returns the options of a posting that needs room for `blocks` blocks."""
    return {"runs": runs_of((0, 0, blocks * BLOCK)), "repack": replace(THREE, staging_bytes=blocks * BLOCK)}


def post(rank: Rank, name: str, blocks: int) -> None:
    rank.post(name, "h", **stage(max(blocks, 3)))
