"""The simulator finds what it is for: each rule of the core that is broken on purpose is found within some seeds."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvgrpc.core import handover, open_access, pull_ends, pull_steps, pulling, serving, state
from kvgrpc.core.accesses import Verdict
from kvgrpc.core.pull import Pull
from kvgrpc.sim import ROUGH, Chaos, Traffic, World

SEEDS = 60


def forget_postings(ends: pull_ends.PullEnds, pull: Pull, *args: Any, **fields: Any) -> None:
    pull.postings.clear()
    end(ends, pull, *args, **fields)


end = pull_ends.PullEnds.end
posting_ended = pulling.Pulls.posting_ended
settle = pull_steps.PullSteps.settle

SABOTAGE: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "a source vouches after its lease ended": (serving, "_verdict", lambda access: Verdict(True)),
    "content is not compared": (open_access, "check", lambda offer, wanted: None),
    "blocks come back while a posting writes": (pull_ends.PullEnds, "end", forget_postings),
    "the engine's steps are not waited for": (state.NodeState, "step_done", lambda self: 1 << 60),
    "leases never expire": (handover.HandOver, "due", lambda self, lease_id: None),
    "a lost posting is taken for one at rest": (
        pulling.Pulls,
        "posting_ended",
        lambda self, event: posting_ended(self, replace(event, quiesced=True)),
    ),
    "a pull ends before it is settled": (
        pull_steps.PullSteps,
        "settle",
        lambda self, pull: (settle(self, pull), self._ends.succeed(pull)),
    ),
}


def run(seeds: int) -> None:
    for seed in range(seeds):
        world = World(seed, engines=2 + seed % 3, ranks=1 + seed % 2, blocks=24, faults=ROUGH)
        Traffic(world, meddling=0.3).requests(25, over_s=5.0)
        Chaos(world).mishaps(over_s=6.0)
        world.run(30.0)
        world.finish()


@pytest.mark.parametrize("name", SABOTAGE)
def test_a_broken_rule_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*SABOTAGE[name])
    with pytest.raises((AssertionError, KeyError)):
        run(SEEDS)


def test_the_same_worlds_are_sound_when_nothing_is_broken() -> None:
    run(10)
