"""Worlds made by hand: what a healthy one does, and what is reported of one that never rests."""

from collections import Counter

import pytest

from kvgrpc.core.content import chain
from kvgrpc.sim import Traffic, Violated, World
from kvgrpc.sim.memory import Prompt
from kvgrpc.sim.requests import Offer, Wish


def test_one_pull_between_two_engines() -> None:
    world = World(seed=1)
    source, consumer = world.hosts
    prompt = Prompt(tuple(range(40)))
    token = source.engine.offer(Offer(b"k" * 16, "r", prompt))
    assert token is not None
    ends: list[object] = []
    consumer.engine.pull(Wish("r", prompt, b"a" * 16), token, ends.append)
    world.run(1.0)
    assert ends == [None]
    world.finish()
    assert world.ends() == Counter({"receive succeeded": 1, "send succeeded": 1})


def test_in_a_healthy_world_a_pull_fails_only_for_what_was_asked() -> None:
    total: Counter[str] = Counter()
    received = 0
    for seed in range(20):
        world = World(seed, engines=2 + seed % 3, ranks=1 + seed % 2)
        traffic = Traffic(world, turns=0.3)
        traffic.requests(15, over_s=5.0)
        world.run(30.0)
        world.finish()
        total += world.failures()
        received += traffic.received
    asked = {"CONTENT_MISMATCH", "LEASE_EXPIRED", "LEASE_RELEASED", "LEASE_VOIDED", "CANCELLED", "QUEUE_TIMEOUT"}
    # Without room for it, a hand-over's blocks are never computed and its pulls wait in vain.
    assert set(total) <= asked | {"LEASE_NOT_FOUND", "LEASE_REFUSED"}
    assert received > 150


def test_prompts_that_diverge_share_only_what_is_equal() -> None:
    world = World(seed=1)
    source, consumer = world.hosts
    offered = tuple(range(64))
    asked = (*offered[:40], 999, *offered[41:])
    token = source.engine.offer(Offer(b"k" * 16, "r", Prompt(offered)))
    assert token is not None
    ends: list[object] = []
    consumer.engine.pull(Wish("r", Prompt(asked), b"a" * 16, use_tokens=32), token, ends.append)
    consumer.engine.pull(Wish("r", Prompt(asked), b"b" * 16), token, ends.append)
    world.run(1.0)
    assert ends[0] is None or ends[1] is None
    assert world.failures() == Counter({"CONTENT_MISMATCH": 1})
    assert chain(offered).digest(32) == chain(asked).digest(32)


def test_a_world_that_never_rests_is_reported() -> None:
    world = World(seed=1)

    def again() -> None:
        world.agenda.after(1.0, again)

    again()
    with pytest.raises(Violated, match="for ever"):
        world.finish()
