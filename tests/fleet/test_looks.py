"""A look at the entries that have changed finds what a look at all of them would, for less."""

import copy
import random

import pytest

from kvgrpc.fleet.directory import Directory, DirectoryLimits, EngineState, HealthCheck, LeadAnswer
from kvgrpc.fleet.due import DueKeys
from kvgrpc.fleet.entry import EngineEntry, EngineRole
from kvgrpc.fleet.history import EngineHistory
from kvgrpc.fleet.pairing import NoPair, PairPicker, PairRequest
from tests.core.counted import steps
from tests.fleet.entries import entry, key_of, listing, proved

SEEDS, STEPS = 20, 200


class RandomSteps:
    """A directory to which everything happens that may, and what is read of it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.directory = Directory(DirectoryLimits(entries=16, outlived=5))
        self.history = EngineHistory(self.directory, most=self.rng.choice([4, 8_192]))
        self.picker = PairPicker(self.history)
        self.now = 100.0
        self.checks: list[HealthCheck] = []

    def some_entry(self) -> EngineEntry:
        return entry(
            self.rng.choice("abcdef"),
            incarnation=self.rng.randrange(1, 4),
            life=self.rng.randrange(1, 4),
            addresses=(f"h{self.rng.randrange(2)}:1",),
            role=self.rng.choice(list(EngineRole)),
            host=self.rng.choice(["", "x", "y"]),
            model=self.rng.choice(["m", "n"]),
            tenant=self.rng.choice(["", "t"]),
            draining=self.rng.random() < 0.1,
        )

    def take(self, revision: int) -> None:
        """Takes one step."""
        self.now += self.rng.choice([0.0, 0.0, 0.0, 0.1, 1.0, 1.0, 5.0, 16.0, -3.0])
        self.checks = (self.checks + self.directory.checks_due(self.now))[-20:]
        one, check = self.some_entry(), self.rng.choice(self.checks) if self.checks else None
        match self.rng.randrange(10):
            case 0:
                self.directory.listed(listing(*(self.some_entry() for _ in range(6)), revision=revision))
            case 1 | 2 | 3:
                self.directory.changed(key_of(one), one.to_json(), revision)
            case 4:
                self.directory.removed(key_of(one), revision)
            case 5 | 6 | 7 if check is not None:
                self.directory.answered(check, self.now)
            case 8 if check is not None:
                self.directory.failed(check, self.now)
            case 9 if check is not None:
                answer = LeadAnswer(self.rng.random(), self.rng.random() < 0.8, self.rng.choice(["", "", "why"]))
                self.directory.heard(check, answer, self.now)
                self.directory.doubted(check, self.now)


def test_the_rows_are_those_of_a_look_at_all_entries() -> None:
    for seed in range(SEEDS):
        one = RandomSteps(seed)
        for revision in range(1, STEPS):
            one.take(revision)
            if one.rng.random() < 0.5:
                one.history.look(one.now)
                found = {key: (row.entry, row.state, row.why, row.listed) for key, row in one.history.by_key().items()}
                state, why = one.directory.state, one.directory.why
                assert found == {
                    each.key: (each.entry, state(each, one.now), why(each, one.now), each) for each in one.directory
                }
                assert all(row.listed is one.directory.listed_at(row.key) for row in one.history.by_key().values())


def test_a_pair_costs_as_much_as_one_of_a_look_at_all_entries() -> None:
    pairs = 0
    for seed in range(SEEDS):
        one = RandomSteps(seed)
        for revision in range(1, STEPS):
            one.take(revision)
            if one.rng.random() < 0.3:
                request = PairRequest(one.rng.choice(["", "m"]), tenant=one.rng.choice(["", "t"]))
                anew = copy.deepcopy(one.directory)
                anew._touched = dict.fromkeys(each.key for each in anew)
                wanted = PairPicker(EngineHistory(anew)).pick_pair(request, one.now)
                found = one.picker.pick_pair(request, one.now)
                if isinstance(found, NoPair) or isinstance(wanted, NoPair):
                    assert found == wanted
                else:
                    assert found.cost.total == pytest.approx(wanted.cost.total)
                    pairs += 1
    assert pairs > SEEDS


def test_the_checks_that_are_due_are_those_of_all_entries_that_count() -> None:
    for seed in range(SEEDS):
        one = RandomSteps(seed)
        for revision in range(1, STEPS):
            one.take(revision)
            now = one.now + one.rng.choice([0.0, 0.5, 1.0, 5.0])
            wanted = {
                each.key
                for each in one.directory
                if each.check_at <= now and one.directory.state(each, now) is not EngineState.OUTLIVED
            }
            due = one.directory.checks_due(now)
            assert {check.key for check in due} == wanted
            one.checks += due


def test_a_key_is_due_once_at_the_earliest_time_that_was_set() -> None:
    due = DueKeys()
    for key, at in (("a", 5.0), ("b", 3.0), ("a", 4.0), ("a", 9.0)):
        due.set(key, at)
    assert due.take(2.9) == []
    assert due.take(4.0) == ["b", "a"]
    due.set("a", 5.0)
    assert due.take(10.0) == ["a"]
    assert due.take(10.0) == []


def fleet(engines: int) -> tuple[Directory, EngineHistory, PairPicker]:
    """Returns a fleet of healthy engines that has been looked at."""
    directory = Directory()
    directory.listed(listing(*(entry(f"e{number}") for number in range(engines))))
    history = EngineHistory(proved(directory))
    picker = PairPicker(history)
    picker._look(0.0)
    return directory, history, picker


def test_a_look_at_one_change_costs_as_much_among_many_entries_as_among_few() -> None:
    def cost(engines: int) -> int:
        directory, _, picker = fleet(engines)
        one = entry("e1", draining=True)
        directory.changed(key_of(one), one.to_json(), 2)
        return steps(lambda: picker._look(0.0))

    assert cost(1_000) == cost(10)


def test_a_look_at_engines_that_are_checked_again_in_time_costs_nothing() -> None:
    def cost(engines: int) -> int:
        directory, history, _ = fleet(engines)
        proved(directory, 5.0)
        assert history.look(14.0) is False
        return steps(lambda: history.look(14.5))

    assert cost(1_000) == cost(10)
