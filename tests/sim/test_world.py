"""Many requests through real cores, in worlds where much goes wrong: whatever happens, nothing wrong is offered.

`World.finish` and the checks inside say what must hold; here is which worlds they are put to. For many more seeds:
`SIM_SEEDS=5000 make test ARGS=tests/sim`.
"""

import os
from collections import Counter
from dataclasses import replace

import pytest

from kvgrpc.core.content import chain
from kvgrpc.core.limits import Limits
from kvgrpc.sim import ROUGH, Chaos, Faults, Traffic, World
from kvgrpc.sim.memory import Prompt
from kvgrpc.sim.requests import Offer, Wish

SEEDS = int(os.environ.get("SIM_SEEDS", "200"))
CHUNK = 20


TIGHT = Limits(
    lease_ttl_s=2.0,
    in_flight_bytes=5,
    lease_cap_s=10.0,
    queue_timeout_s=3.0,
    transfer_timeout_s=2.0,
    settle_timeout_s=1.0,
    registration_timeout_s=5.0,
    peer_grace_s=1.5,
    connect_timeout_s=1.0,
    open_wait_s=0.5,
    idempotency_s=2.0,
    leases=15,
    transfers=40,
    transfer_history=2,
    idempotency_keys=60,
    accesses=25,
    peers=2,
    tombstones=3,
    ended_leases=3,
)
"""Every table of a lead is full now and then, and every deadline is near."""
STORMY = replace(
    ROUGH,
    slow=0.1,
    lose_request=0.08,
    lose_reply=0.08,
    duplicate=0.1,
    stall=0.1,
    stall_s=(0.5, 10.0),
    break_posting=0.08,
    lose_posting=0.08,
    break_mapping=0.1,
    silence_s=(0.1, 1.0),
)


def story(seed: int, faults: Faults = ROUGH, *, chaos: bool = True, requests: int = 15) -> tuple[World, Traffic]:
    """A world of two to four engines, to its end."""
    world = World(seed, engines=2 + seed % 3, ranks=1 + seed % 2, blocks=(48, 24)[seed % 5 == 0], faults=faults)
    traffic = Traffic(world)
    traffic.requests(requests, over_s=5.0)
    if chaos:
        Chaos(world).mishaps(over_s=6.0)
    world.run(30.0)
    world.finish()
    return world, traffic


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


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_nothing_goes_wrong_that_must_not_go_wrong(first: int) -> None:
    for seed in range(first, min(first + CHUNK, SEEDS)):
        try:
            story(seed)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("first", range(0, SEEDS // 4, CHUNK // 2))
def test_nor_where_every_bound_is_reached(first: int) -> None:
    for seed in range(first, first + CHUNK // 2):
        world = World(
            seed, engines=2 + seed % 4, ranks=1 + seed % 3, blocks=(16, 40, 100)[seed % 3], faults=STORMY, limits=TIGHT
        )
        Traffic(world, meddling=0.3).requests(40, over_s=8.0)
        Chaos(world).mishaps(over_s=8.0, crashes=2.0, losses=1.5, cuts=3.0)
        try:
            world.run(30.0)
            world.finish()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


def test_in_a_healthy_world_a_pull_fails_only_for_what_was_asked() -> None:
    total: Counter[str] = Counter()
    received = 0
    for seed in range(20):
        world, traffic = story(seed, Faults(), chaos=False)
        total += world.failures()
        received += traffic.received
    asked = {"CONTENT_MISMATCH", "LEASE_EXPIRED", "LEASE_RELEASED", "LEASE_VOIDED", "CANCELLED", "QUEUE_TIMEOUT"}
    # Without room for it, a hand-over's blocks are never computed and its pulls wait in vain.
    assert set(total) <= asked | {"LEASE_NOT_FOUND", "LEASE_REFUSED"}
    assert received > 150


def test_the_worlds_are_rough_enough_to_see_every_kind_of_end() -> None:
    ends: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for seed in range(1000, 1030):
        world, _ = story(seed)
        ends += world.ends()
        failures += world.failures()
    assert set(ends) == {
        f"{direction} {state}" for direction in ("send", "receive") for state in ("succeeded", "failed", "cancelled")
    }
    assert ends["receive succeeded"] > 200
    assert set(failures) >= {
        "CANCELLED", "CONTENT_MISMATCH", "DATA_PATH_FAILED", "ENGINE_LOST", "INCARNATION_CHANGED", "LEASE_EXPIRED",
        "LEASE_RELEASED", "LEASE_VOIDED", "NO_DATA_PATH", "PEER_LOST", "PEER_UNREACHABLE", "TRANSFER_TIMEOUT",
    }  # fmt: skip


def test_the_same_seed_gives_the_same_run() -> None:
    def run() -> tuple[object, ...]:
        world, traffic = story(7)
        seqs = [host.node.state.transfers.seq for host in world.hosts]
        return world.agenda.events, world.agenda.now, world.ends(), world.failures(), traffic.received, seqs

    assert run() == run()


def test_another_seed_gives_another_run() -> None:
    assert story(1)[0].agenda.events != story(4)[0].agenda.events


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
    with pytest.raises(AssertionError, match="for ever"):
        world.finish()
