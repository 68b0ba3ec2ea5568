"""The whole system on a network that is good, slow or lossy: every transfer brings exactly its bytes."""

from typing import Any

import pytest

from tests.hosts.switched import CONDITIONS
from tests.hosts.system import DECODE, PREFILL, System
from tests.hosts.traffic import Move, all_started, between, path_of


@pytest.mark.parametrize("condition", CONDITIONS.values(), ids=list(CONDITIONS))
def test_pulls_and_pushes_between_all_engines_succeed(system: System, condition: dict[str, Any]) -> None:
    system.network.set(**condition)
    for move in all_started(between(system, PREFILL, DECODE)):
        move.ended(must_succeed=True)
        assert path_of(move) == [system.path]


def test_a_router_sends_requests_to_pairs_of_the_fleet_on_a_slow_network(system: System) -> None:
    system.network.set(delay_s=0.02)
    used = set()
    for seed in range(4):
        pair = system.picked(system.router)
        used.add(pair)
        Move("pull", *(system.engines[name] for name in pair), seed=seed).start().ended(must_succeed=True)
    assert len(used) > 1, "picks spread over the engines"
