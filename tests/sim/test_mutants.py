"""The simulator finds every bug planted in the core within its stated number of seeds.

`make sim-mutants` prints the table; docs/reliability.md shows it.
"""

import pytest

from sim import drawn, run
from tests.sim.mutants import MUTANTS, STEPS, Mutant, hunt, planted

SOUND = 30
WORLDS = {
    "honest": {},
    "with a liar": {"liars": True},
    "unlike": {"unlike": True},
    "mirrors": {"mirrors": True},
    "sends": {"collective": True},
    "sends, with a liar": {"collective": True, "liars": True},
    "rings": {"rings": True},
    "strangers": {"strangers": True},
}


@pytest.mark.timeout(900)  # up to 400 worlds, each of which takes seconds on a busy machine
@pytest.mark.parametrize("mutant", [pytest.param(m, id=m.what, marks=pytest.mark.family(m.rule.name)) for m in MUTANTS])
def test_a_planted_bug_is_found(mutant: Mutant) -> None:
    assert hunt(mutant).seeds is not None


def test_a_bug_is_planted_in_one_place_and_gone_afterwards(subtests: pytest.Subtests) -> None:
    for mutant in MUTANTS:
        sound = vars(mutant.place).get(mutant.name)
        with subtests.test(mutant.what):
            with planted(mutant):
                assert vars(mutant.place)[mutant.name] is not sound
            assert vars(mutant.place).get(mutant.name) is sound


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, id=name, marks=pytest.mark.family(name)) for name, kind in WORLDS.items()]
)
@pytest.mark.parametrize("seed", range(SOUND))
def test_the_same_worlds_are_sound_when_nothing_is_planted(seed: int, kind: dict[str, bool]) -> None:
    assert run(drawn(seed, STEPS, **kind)).violations == []
