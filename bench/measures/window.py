"""The data path window, beside shm: what it costs that a peer does not map the pool."""

import statistics
from dataclasses import replace

import numpy as np

from bench.measures.rate import ServerPair, pair
from bench.plan import PullPlan, environment_of
from bench.results.pulls import PullResult
from kvgrpc.config import WINDOW


async def measure(plan: PullPlan, found: PullResult) -> None:
    """Fills in the figure: pulls of whole pools in turn. Raises KVGrpcError if a call fails."""
    block_bytes = max(plan.block_bytes)
    blocks = plan.pool_bytes // block_bytes
    private, open_ = (replace(plan, data_paths=(path,)) for path in (WINDOW, "shm"))
    async with (
        pair(private, environment_of(WINDOW), block_bytes=block_bytes, blocks=blocks) as window,
        pair(open_, environment_of("shm"), block_bytes=block_bytes, blocks=blocks) as shm,
    ):
        # The first round is not counted: it also maps memory and connects.
        pulls = [(await _pull_s(window, blocks), await _pull_s(shm, blocks)) for _ in range(plan.repeats + 1)][1:]
    found.private_window_ratio_shm = statistics.median(b / a for a, b in pulls)
    found.details["private_window_gbps"] = plan.pool_bytes / statistics.median(a for a, _ in pulls) / 1e9


async def _pull_s(servers: ServerPair, blocks: int) -> float:
    ids = np.arange(blocks, dtype=np.int64)
    return (await servers.caller.pull(ids, ids)).seconds
