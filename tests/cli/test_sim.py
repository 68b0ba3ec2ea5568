"""`python -m sim`: its output, its exit codes, and that a seed always gives the same world."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from sim.__main__ import app
from tests.docs.pages import ROOT
from tests.sim.mutants import named, planted

BUG = "two postings write into one block"


def sim(*args: str) -> Result:
    return CliRunner().invoke(app, [*args])


def as_json(*args: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(sim(*args, "--json").stdout)
    return found


TIMES = ("seconds", "processor_s", "steps_per_s")


def timeless(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name not in TIMES}


def test_sound_worlds_exit_with_0_and_say_how_much_was_seen() -> None:
    done = sim("--first-seed", "5", "--seeds", "3", "--steps", "300", "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert (found["first_seed"], found["seeds"], found["next_seed"], found["violations"]) == (5, 3, 8, [])
    assert found["steps"] >= 900
    assert found["faults"]["lose_request"] > 0
    assert found["transfers"]["receive succeeded"] > 0
    assert found["steps_per_s"] == pytest.approx(found["steps"] / found["processor_s"], rel=0.01)


def test_the_same_seeds_are_the_same_worlds_one_by_one_or_at_once() -> None:
    args = ("--seeds", "4", "--steps", "200")
    assert timeless(as_json(*args)) == timeless(as_json(*args)) == timeless(as_json(*args, "--jobs", "2"))


def test_each_world_has_a_digest_that_another_decision_changes() -> None:
    args = ("--seeds", "3", "--steps", "200", "--digest")
    digests = as_json(*args)["digests"]
    assert list(digests) == ["0", "1", "2"]
    assert len(set(digests.values())) == 3
    assert as_json(*args, "--jobs", "2")["digests"] == digests
    assert f"seed 2: digest {digests['2']}" in sim(*args).stdout
    one = ("--seed", "0", "--steps", "3000", "--digest")
    with planted(named(BUG)):
        changed = as_json(*one)["digests"]
    assert changed != as_json(*one)["digests"]


def test_worlds_with_a_liar_are_others_and_are_replayed_as_such() -> None:
    args = ("--seeds", "2", "--steps", "200", "--digest")
    honest, lying = as_json(*args), as_json(*args, "--liars")
    assert lying["violations"] == []
    assert lying["faults"]["invented"] > 0
    assert not set(honest["digests"].values()) & set(lying["digests"].values())
    with planted(named("a life that was replaced is heard")):
        done = sim("--seeds", "10", "--steps", "3000", "--liars", "--json")
    assert done.exit_code == 1
    violation = json.loads(done.stdout)["violations"][0]
    assert violation["replay"] == f"python -m sim --seed {violation['seed']} --steps 3000 --liars --trace"


def test_people_get_a_table() -> None:
    done = sim("--seeds", "2", "--steps", "200")
    assert done.exit_code == 0
    assert "steps_per_s" in done.stdout
    assert done.stdout.endswith("no violations\n")


def test_a_violation_exits_with_1_and_says_how_to_replay_it() -> None:
    with planted(named(BUG)):
        done = sim("--seeds", "1", "--steps", "3000", "--json")
    assert done.exit_code == 1
    (violation,) = json.loads(done.stdout)["violations"]
    assert (violation["seed"], violation["rule"]) == (0, "R1")
    assert violation["message"].startswith("two postings write into cells")
    assert violation["replay"] == "python -m sim --seed 0 --steps 3000 --trace"


def test_a_violation_is_shown_with_a_trace_and_replays_exactly() -> None:
    with planted(named(BUG)):
        first, again, table = (sim(*args) for args in (*[("--seed", "0", "--trace")] * 2, ("--seed", "0")))
    assert [done.exit_code for done in (first, again, table)] == [1, 1, 1]
    assert first.stdout == again.stdout
    lines = first.stdout.splitlines()
    assert len(lines) < 50
    assert any("> Post(" in line for line in lines)
    assert lines[-1].startswith("R1: two postings write into cells")
    assert table.stdout.endswith(first.stdout)


def test_a_sound_seed_has_nothing_to_trace() -> None:
    done = sim("--seed", "1", "--steps", "200", "--trace")
    assert done.exit_code == 0
    assert done.stdout == "seed 1: every rule holds in 200 steps\n"


def test_worlds_may_be_bounded_by_time_alone_but_need_a_bound() -> None:
    assert as_json("--seeds", "0", "--seconds", "0.01", "--steps", "50")["seeds"] >= 1
    assert sim("--seeds", "0").exit_code == 2
    assert sim("--trace").exit_code == 2


def test_a_scenario_is_replayed_and_what_it_says_otherwise_is_told(tmp_path: Path) -> None:
    good = ROOT / "tests" / "scenarios" / "a_renewal_took_time_away.txt"
    played = sim("--scenario", str(good))
    assert (played.exit_code, played.stdout) == (0, good.read_text())
    other = tmp_path / "other.txt"
    other.write_text(good.read_text().replace("renewed, 20.0s left", "renewed, 19.0s left"))
    told = sim("--scenario", str(other))
    assert (told.exit_code, told.stdout) == (1, good.read_text())
    other.write_text("dance P\n----\n")
    assert sim("--scenario", str(other)).exit_code == 1
