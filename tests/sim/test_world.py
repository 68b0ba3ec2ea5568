"""Worlds made by hand: what a healthy one does, and what is reported of one that never rests."""

from collections import Counter
from collections.abc import Callable

import pytest

from kvgrpc.core.actions import FailedNews
from kvgrpc.core.values.content import chain
from kvgrpc.errors import Reason
from sim import Traffic, Violated, World
from sim.engine.requests import PromptOffer, PromptWish
from sim.hosts.host import Host
from sim.world.memory import Prompt


def test_one_pull_between_two_engines() -> None:
    world = World(seed=1)
    source, consumer = world.hosts
    prompt = Prompt(tuple(range(40)))
    token = source.engine.offer(PromptOffer(b"k" * 16, "r", prompt))
    assert token is not None
    ends: list[object] = []
    consumer.engine.pull(PromptWish("r", prompt, b"a" * 16), token, ends.append)
    world.run(1.0)
    assert ends == [None]
    world.finish()
    assert world.ends() == Counter({"receive succeeded": 1, "send succeeded": 1})


def pulled(world: World, at_s: float, befall: Callable[[Host], None]) -> list[object]:
    """Returns the ends of a pull between two engines whose source is hit by `befall` at that time, in seconds."""
    source, consumer = world.hosts
    prompt = Prompt(tuple(range(40)))
    token = source.engine.offer(PromptOffer(b"k" * 16, "r", prompt))
    assert token is not None
    ends: list[object] = []
    consumer.engine.pull(PromptWish("r", prompt, b"a" * 16), token, ends.append)
    world.agenda.after(at_s, lambda: befall(source))
    world.run(30.0)
    world.finish()
    return ends


def test_what_happens_while_a_host_is_stopped_it_learns_then() -> None:
    world = World(seed=1)
    assert pulled(world, 0.0, lambda host: host.stop(0.5, movers_s=0.5)) == [None]
    assert world.ends() == Counter({"receive succeeded": 1, "send succeeded": 1})


@pytest.mark.parametrize("events", range(12))
def test_a_lead_may_crash_in_the_middle_of_any_event(events: int) -> None:
    world = World(seed=events)

    def befall(host: Host) -> None:
        host.doom(events)
        world.agenda.after(5.0, lambda: None if host.up else host.start())

    (end,) = pulled(world, 0.0, befall)
    assert end is None or isinstance(end, FailedNews)


def test_a_rank_that_dies_ends_the_life_of_its_engine() -> None:
    world = World(seed=1, ranks=2)
    (end,) = pulled(world, 0.003, lambda host: host.lose_rank(1, back_after_s=1.0))
    assert isinstance(end, FailedNews)
    assert all(host.ready for host in world.hosts)


def test_nothing_passes_over_a_link_that_is_cut_one_way() -> None:
    world = World(seed=1)
    p, d = (host.address for host in world.hosts)
    world.network.cut(p, d, one_way=True)
    (end,) = pulled(world, 60.0, lambda host: None)
    assert isinstance(end, FailedNews)
    assert end.failure.reason is Reason.PEER_UNREACHABLE


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
    # A hand-over without room never has its blocks computed, and its pulls wait in vain.
    assert set(total) <= asked | {"LEASE_NOT_FOUND", "LEASE_REFUSED"}
    assert received > 150


def test_prompts_that_diverge_share_only_what_is_equal() -> None:
    world = World(seed=1)
    source, consumer = world.hosts
    offered = tuple(range(64))
    asked = (*offered[:40], 999, *offered[41:])
    token = source.engine.offer(PromptOffer(b"k" * 16, "r", Prompt(offered)))
    assert token is not None
    ends: list[object] = []
    consumer.engine.pull(PromptWish("r", Prompt(asked), b"a" * 16, use_tokens=32), token, ends.append)
    consumer.engine.pull(PromptWish("r", Prompt(asked), b"b" * 16), token, ends.append)
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
