"""Cuts of a network between hosts, and their end. Packets are swallowed: no side is told."""

import pytest

from tests.hosts.system import DECODE, NAMES, PREFILL, System
from tests.hosts.traffic import LONG, Move, all_started, between, on_their_way
from tests.service.engines import FAILED, wait_until


def test_a_partition_ends_what_crosses_it_and_nothing_else(system: System) -> None:
    engines = system.engines
    across, beside = between(system, ("p1",), ("d1",), LONG), between(system, ("p2",), DECODE)
    late = between(system, ("p1",), ("d1",))
    all_started(across + beside)
    on_their_way(across)
    system.network.set(cut=[(system.host["p1"], system.host["d1"])])
    all_started(late)
    for move in beside + all_started(between(system, ("p1",), ("d2",))):
        move.ended(must_succeed=True)
    assert {move.ended().state for move in across + late} == {FAILED}
    system.restore()
    for kind in ("pull", "push"):
        wait_until(lambda kind=kind: Move(kind, engines["p1"], engines["d1"]).start().ended().state != FAILED)  # type: ignore[misc]


@pytest.mark.parametrize(("speaks", "hears"), [("p1", "d1"), ("d1", "p1")])
def test_a_cut_of_one_way_ends_what_crosses_it_with_a_reason_and_gives_the_blocks_back(
    system: System, speaks: str, hears: str
) -> None:
    """One host hears the other, and is not heard: its packets are swallowed, those of the other one arrive."""
    engines = system.engines
    across, beside = between(system, ("p1",), ("d1",), LONG), between(system, ("p2",), DECODE)
    late = between(system, ("p1",), ("d1",))
    all_started(across + beside)
    on_their_way(across)
    system.network.set(one_way=[(system.host[speaks], system.host[hears])])
    all_started(late)
    for move in beside:
        move.ended(must_succeed=True)
    assert {move.ended().state for move in across + late} == {FAILED}
    system.restore()
    for kind in ("pull", "push"):
        wait_until(lambda kind=kind: Move(kind, engines["p1"], engines["d1"]).start().ended().state != FAILED)  # type: ignore[misc]


def test_a_host_that_is_cut_off_gets_no_requests_and_is_used_again_when_it_is_back(system: System) -> None:
    engines = system.engines
    across = between(system, PREFILL, ("d1",), LONG)
    all_started(across)
    on_their_way(across)
    system.network.set(cut=system.network.links_of(system.host["d1"]))
    wait_until(lambda: system.states(system.router).get("d1") != "healthy")
    for seed in range(4):
        prefill, decode = system.picked(system.router)
        assert decode == "d2"
        Move("pull", engines[prefill], engines[decode], seed=seed).start().ended(must_succeed=True)
    assert {move.ended().state for move in across} == {FAILED}
    system.restore()
    for source in PREFILL:
        wait_until(lambda source=source: Move("pull", engines[source], engines["d1"]).start().ended().state != FAILED)  # type: ignore[misc]


def test_engines_without_etcd_go_on_with_the_last_list_marked_stale(system: System) -> None:
    cut_off = system.engines["p1"]
    wait_until(lambda: system.states(cut_off.address) == dict.fromkeys(NAMES, "healthy"))
    assert not system.stale(cut_off.address)
    system.network.set(cut=[(system.host["p1"], system.hub)])
    wait_until(lambda: system.stale(cut_off.address))
    # Its entry ends, and others are told; what it knows stays.
    wait_until(lambda: "p1" not in system.states(system.router))
    assert not system.stale(system.router)
    assert system.picked(system.router)[0] == "p2"
    assert system.states(cut_off.address) == dict.fromkeys(NAMES, "healthy")
    prefill, decode = system.picked(cut_off.address)
    Move("pull", system.engines[prefill], system.engines[decode]).start().ended(must_succeed=True)
    Move("push", cut_off, system.engines[decode]).start().ended(must_succeed=True)
    system.network.set()
    wait_until(lambda: not system.stale(cut_off.address))
    wait_until(lambda: system.states(system.router) == dict.fromkeys(NAMES, "healthy"))
