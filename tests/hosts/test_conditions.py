"""The whole system on a network that is good, slow or lossy: every transfer brings exactly its bytes."""

from typing import Any

import pytest

from tests.cli.commands import run
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
        Move("pull", system.engines[pair[0]], system.engines[pair[1]], seed=seed).start().ended(must_succeed=True)
    assert len(used) > 1, "picks spread over the engines"


def test_the_path_and_the_reason_against_each_better_one_are_one_line(system: System) -> None:
    move = Move("pull", system.engines["p1"], system.engines["d1"])
    move.start().ended(must_succeed=True)
    address = move.destination.address
    (of_peer,) = run("describe", "peer", "p1", address)[1]
    of_transfer, *_ = run("describe", "transfer", move.transfer_id, address)[1]
    why = {"collective": "Gloo, over TCP", "nixl": ""}[system.path]
    better = {"collective": ("shm", "cma", "nixl"), "nixl": ("shm", "cma")}[system.path]
    for line in (of_peer, of_transfer):
        assert f": {system.path}: {why}" in line
        assert [name for name in better if f"; not {name}: " not in line] == []
        assert "in another network namespace it is found only through a shared_dir" in line
    if system.path == "collective":
        assert "over TCP only" in of_transfer
