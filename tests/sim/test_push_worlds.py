"""Pushes through real cores in rough worlds, whichever side moves the bytes, and rules of push broken on purpose.

For many more seeds: `SIM_SEEDS=5000 make test ARGS=tests/sim`.
"""

import os
from collections import Counter
from typing import Any

import pytest

from kvgrpc.core import delivering, push_ends, push_steps
from kvgrpc.core.landing import Landing
from kvgrpc.sim import ROUGH, Chaos, Faults, Traffic, World
from tests.sim.test_world import STORMY, TIGHT

SEEDS = int(os.environ.get("SIM_SEEDS", "200")) // 5
MODES = pytest.mark.parametrize(
    "writers", [frozenset[str](), frozenset({"loopback"})], ids=["destination moves", "source moves"]
)


def story(seed: int, writers: frozenset[str], faults: Faults = ROUGH, **world: Any) -> tuple[World, Traffic]:
    """A world of two to four engines, to its end."""
    made = World(seed, engines=2 + seed % 3, ranks=1 + seed % 2, faults=faults, writers=writers, **world)
    traffic = Traffic(made, meddling=0.2, pushes=0.7)
    traffic.requests(20, over_s=5.0)
    if faults is not HEALTHY:
        Chaos(made).mishaps(over_s=6.0)
    try:
        made.run(30.0)
        made.finish()
    except AssertionError as error:
        error.add_note(f"seed {seed}")
        raise
    return made, traffic


HEALTHY = Faults()


@MODES
def test_nothing_goes_wrong_that_must_not_go_wrong(writers: frozenset[str]) -> None:
    for seed in range(SEEDS):
        story(seed, writers, blocks=(48, 24)[seed % 5 == 0])


@MODES
def test_nor_where_every_bound_is_reached(writers: frozenset[str]) -> None:
    for seed in range(SEEDS):
        story(seed, writers, STORMY, limits=TIGHT, blocks=(16, 40, 100)[seed % 3])


@MODES
def test_in_a_healthy_world_a_push_fails_only_for_what_was_asked(writers: frozenset[str]) -> None:
    total: Counter[str] = Counter()
    pushed = 0
    for seed in range(10):
        world, traffic = story(seed, writers, HEALTHY)
        total += world.failures()
        pushed += traffic.pushed
    assert pushed > 60
    assert not set(total) & {"TRANSFER_TIMEOUT", "SETTLE_TIMEOUT", "PEER_LOST", "DATA_PATH_FAILED", "INVALID_FIELD"}


closed = delivering.Deliveries.closed
post = push_steps.PushSteps._post
released = push_ends.PushEnds.lease_ended


def post_twice(steps: Any, push: Any) -> None:
    post(steps, push)
    for action in [action for action in steps._state.actions if type(action).__name__ == "Post"]:
        steps._state.emit(action)


SABOTAGE: dict[str, tuple[object, str, Any]] = {
    "a released handle is trusted": (
        delivering.Deliveries,
        "closed",
        lambda self, access, **fields: closed(self, access, **(fields | {"quiesced": True})),
    ),
    "blocks come back while a source may write": (Landing, "busy", property(lambda self: bool(self.postings))),
    "two postings write into one block": (push_steps.PushSteps, "_post", post_twice),
    "bytes come before the access": (delivering.Deliveries, "misses_step", lambda self, access: False),
    "a send concludes": (
        push_steps.PushSteps,
        "_post",
        lambda self, push: (post(self, push), push.postings.clear(), self.settle(push)),
    ),
    "a source frees blocks under its own write": (
        push_ends.PushEnds,
        "lease_ended",
        lambda self, lease, message: (released(self, lease, message), False)[1],
    ),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_a_broken_rule_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*SABOTAGE[name])
    with pytest.raises((AssertionError, KeyError)):  # noqa: PT012 - one of the worlds finds it
        for seed in range(60):
            story(seed, frozenset({"loopback"}), blocks=24)
