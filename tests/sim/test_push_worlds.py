"""Pushes through real cores in a healthy world, with either side as the mover. `test_seeds` has worlds with faults."""

from collections import Counter

import pytest

from sim import Traffic, World
from sim.seeds.setup import WRITES


@pytest.mark.parametrize("writers", [frozenset[str](), WRITES], ids=["destination moves", "source moves"])
def test_in_a_healthy_world_a_push_fails_only_for_what_was_asked(writers: frozenset[str]) -> None:
    total: Counter[str] = Counter()
    pushed = 0
    for seed in range(10):
        world = World(seed, engines=2 + seed % 3, ranks=1 + seed % 2, writers=writers)
        traffic = Traffic(world, meddling=0.2, pushes=0.7)
        traffic.requests(20, over_s=5.0)
        world.run(30.0)
        world.finish()
        total += world.failures()
        pushed += traffic.pushed
    assert pushed > 60
    assert not set(total) & {"TRANSFER_TIMEOUT", "SETTLE_TIMEOUT", "PEER_LOST", "DATA_PATH_FAILED", "INVALID_FIELD"}
