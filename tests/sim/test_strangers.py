"""Worlds with a caller that has no ticket and names what belongs to engines: it is refused, and nothing changes.

For many more seeds: `python -m sim --strangers`. `test_mutants` shows the bugs of leads that take it for the engine.
"""

from collections import Counter
from dataclasses import replace

import pytest

from kvgrpc.core.actions import Acknowledged, Action
from kvgrpc.core.events import AcknowledgeTransfers, Call, Event, WaitsFor
from kvgrpc.core.values.owners import ANONYMOUS
from kvgrpc.errors import NotFound, Reason
from sim import Outcome, Rule, Violated, drawn, run
from sim.checks.owners import check_refused, check_same, of_stranger
from sim.world.trace import Digest

FIRST = 6_000
SEEDS = 16
STEPS = 1_500
SAID = AcknowledgeTransfers(Call(0, ANONYMOUS), ("t-1",))


class Ear:
    """Counts what a stranger asks for."""

    def __init__(self) -> None:
        self.said: Counter[str] = Counter()

    def event(self, _: str, __: float, event: Event) -> None:
        if of_stranger(event):
            part = getattr(event, "waits_for", None) is WaitsFor.REGISTRATION
            self.said["part" if part else type(event).__name__] += 1

    def actions(self, address: str, now: float, actions: list[Action]) -> None:
        pass

    def note(self, address: str, now: float, what: str) -> None:
        pass


@pytest.fixture(scope="module")
def seen() -> tuple[Outcome, Counter[str]]:
    """Returns the summed outcome of all worlds of this file, and what strangers asked for in them."""
    total, ear = Outcome(), Ear()
    for seed in range(FIRST, FIRST + SEEDS):
        total.add(run(drawn(seed, STEPS, strangers=True), ear))
    return total, ear.said


def test_every_rule_holds(seen: tuple[Outcome, Counter[str]]) -> None:
    assert seen[0].violations == []
    assert seen[0].steps >= SEEDS * STEPS


def test_a_stranger_says_everything_that_takes_a_name_and_much_goes_on_all_the_same(
    seen: tuple[Outcome, Counter[str]],
) -> None:
    outcome, said = seen
    assert said.keys() == {
        "AcknowledgeTransfers", "AllocateBlocks", "CancelTransfer", "FinishedBlocks", "FreeBlocks", "GiveAllocation",
        "GiveDestination", "PullBlocks", "ReclaimBlocks", "ReserveBlocks", "part",
    }  # fmt: skip
    assert sum(said.values()) > 50 * SEEDS
    assert outcome.ends["receive succeeded"] > 10 * SEEDS


def test_pools_are_managed_by_engines_in_some_worlds_and_by_servers_in_others() -> None:
    setups = [drawn(seed, STEPS, strangers=True) for seed in range(FIRST, FIRST + SEEDS)]
    assert {setup.given_out for setup in setups} == {False, True}
    assert not any(setup.given_out and setup.aliased for setup in setups)


def test_the_same_setup_gives_the_same_run_and_a_stranger_makes_it_another() -> None:
    def digest(*, strangers: bool) -> int:
        seen = Digest()
        run(drawn(FIRST, 500, strangers=strangers), seen)
        return seen.value

    assert digest(strangers=True) == digest(strangers=True) != digest(strangers=False)


def test_an_engine_does_in_a_pool_that_its_server_manages_what_it_does_in_its_own() -> None:
    setup = next(setup for seed in range(FIRST, FIRST + SEEDS) if (setup := drawn(seed, STEPS)).faults.cell_s[1] < 0.01)
    outcome = run(replace(setup, given_out=True))
    assert outcome.violations == []
    assert outcome.ends["receive succeeded"] > 0


def test_a_stranger_that_is_answered_well_is_a_violation() -> None:
    check_refused(SAID, NotFound(Reason.TRANSFER_NOT_FOUND, "none"), "here")
    check_refused(SAID, Acknowledged(0), "here")
    with pytest.raises(Violated, match="AcknowledgeTransfers of a stranger is answered well at here") as raised:
        check_refused(SAID, Acknowledged(1), "here")
    assert raised.value.rule is Rule.R12


def test_a_stranger_that_changes_something_is_a_violation() -> None:
    check_same(SAID, {"leases": {}}, {"leases": {}}, "here")
    with pytest.raises(Violated, match="AcknowledgeTransfers of a stranger changes leases at here"):
        check_same(SAID, {"leases": {}}, {"leases": {"l-1": True}}, "here")
