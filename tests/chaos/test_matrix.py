"""Whoever is killed, stands still or cannot be reached, at whichever step, over whichever data path.

What must be true of those that survive: their transfer is over within its bounds, and what they are not given back says
for want of which proof. What they then put into their blocks stays there, whatever the victim still does when it goes
on. At the end nothing is held on either side, the next request is served, and a grant of a life that is over gives
nothing.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.cast import Player
from tests.chaos.play import BLOCKS, ENDS, KV, NEW, NEXT, STEPS, TARGET, TOKENS, Play, check_over
from tests.e2e.conftest import PATHS
from tests.engine.support import Workers
from tests.service.values import prompt

TEST_S = 180
VICTIMS = [(who, part) for who in ("P", "D") for part in ("lead", "scheduler", "worker")]
NETWORK = ("", "network")
SPARE, FREE = list(range(40, 44)), list(range(44, 48))
"""Blocks that no play uses: of what comes after it."""


@dataclass(frozen=True)
class Case:
    path: str
    mode: str
    step: str
    who: str
    part: str
    deed: str

    @property
    def name(self) -> str:
        victim = f"{self.who} {self.part}".strip()
        return f"{self.path}, {self.mode}, {self.step}: {victim} {self.deed}"


def cases() -> Iterator[Case]:
    for path in PATHS:
        for mode, steps in STEPS.items():
            for step in steps:
                for who, part in VICTIMS:
                    if step != "before the settle" or part == "lead":
                        for deed in ("killed", "stopped"):
                            yield Case(path, mode, step, who, part, deed)
                if step != "before the settle":
                    yield Case(path, mode, step, *NETWORK, "cut")


QUICK = {
    ("shm", "pull", "bytes on their way", "P lead", "killed"),
    ("shm", "push", "between two parts", "D lead", "stopped"),
    ("shm", "layers", "between two layers", "P scheduler", "killed"),
    ("cma", "pull", "bytes on their way", "D lead", "killed"),
    ("cma", "push", "bytes on their way", "P worker", "killed"),
    ("cma", "layers", "bytes on their way", "D worker", "stopped"),
    ("nixl", "pull", "waiting for blocks", "P lead", "stopped"),
    ("nixl", "push", "bytes on their way", "P worker", "stopped"),
    ("nixl-tcp", "push", "bytes on their way", "P lead", "stopped"),
    ("nixl-tcp", "pull", "bytes on their way", "network", "cut"),
}
"""Those that run with all tests: every victim, deed, mode, path and most steps."""


def marked(case: Case) -> object:
    quick = (case.path, case.mode, case.step, f"{case.who} {case.part}".strip(), case.deed) in QUICK
    return pytest.param(case, id=case.name, marks=[] if quick else [pytest.mark.chaos, pytest.mark.slow])


@pytest.fixture(scope="module")
def actors() -> Iterator[Workers]:
    made = Workers("tests.chaos.actor")
    yield made
    made.close()


@pytest.fixture
def cast(
    request: pytest.FixtureRequest, tmp_path: Path, actors: Workers, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Player, Player]]:
    case = request.getfixturevalue("case")
    for name, value in PATHS[case.path][1].items():
        monkeypatch.setenv(name, value)
    with ExitStack() as stack:
        players = [Player(tmp_path, name, case.path, actors) for name in ("P", "D")]
        for player in players:
            stack.callback(player.close)
        source, destination = (player.ready() for player in players)
        yield source, destination


def do(case: Case, source: Player, destination: Player) -> None:
    """What happens to the victim."""
    if (case.who, case.part) == NETWORK:
        source.cut()
        destination.cut()
        return
    victim = source if case.who == "P" else destination
    (victim.kill if case.deed == "killed" else victim.stop)(case.part)


def check_serves(source: Player, destination: Player) -> None:
    """The next request brings its bytes."""
    name, tokens = f"next from {source.name}", prompt(64, seed=3)
    source.paint(SPARE, NEXT)
    destination.paint(FREE, 0)
    grant = source.ask("hand_over", name=name, blocks=SPARE, tokens=tokens)
    destination.ask("pull", name=name, grant=grant, tokens=tokens)
    destination.ask("start", name=name, blocks=FREE)
    assert check_over(destination, name) == "Received"
    assert check_over(source, name) == "BlocksReturned"
    assert destination.see(FREE) == [NEXT]


def check_gives_nothing(grant: str, source: Player, destination: Player) -> None:
    """A grant of a life that is over, at the same address, of the same blocks, which hold something else."""
    source.paint(BLOCKS, NEXT)
    destination.ask("pull", name="old", grant=grant, tokens=TOKENS)
    destination.ask("start", name="old", blocks=TARGET)
    assert check_over(destination, "old") == "BlocksReturned"


def check_transports(case: Case, found: list[str]) -> None:
    """The bytes went by what the case says."""
    assert found
    if case.path == "nixl-tcp":
        assert all("tcp" in transport and "cma" not in transport for transport in found), found


def end_of(play: Play, player: Player) -> str:
    """The last event of a player's transfer. What was received is the source's KV, whole."""
    end = check_over(player, play.name)
    assert end != "Received" or not player.sound("worker") or player.see(TARGET) == [KV]
    return end


@pytest.mark.timeout(TEST_S)
@pytest.mark.parametrize("case", [marked(case) for case in cases()])
def test_who_survives_is_never_wrong_and_never_stuck(case: Case, cast: tuple[Player, Player]) -> None:
    source, destination = cast
    play = Play(source, destination, case.mode)
    play.bring_to(case.step)
    do(case, source, destination)
    play.go_on()
    kept, blocks = {}, {"P": BLOCKS, "D": TARGET}
    for player in cast:
        told = player.sound("lead") and player.sound("scheduler") and play.knows(player)
        if told and end_of(play, player) in ENDS and player.sound("worker"):
            player.paint(blocks[player.name], NEW)
            kept[player.name] = blocks[player.name]
    for player in cast:
        player.mend()
        player.resume()
    lives = [player.revive() for player in cast]
    for player, new_life in zip(cast, lives, strict=True):
        player.wait_at_rest()
        if not new_life and play.knows(player) and player.name not in kept:
            assert end_of(play, player) in ENDS, "what was in quarantine has not come back"
    for player in cast:
        if player.name in kept:
            assert player.see(kept[player.name]) == [NEW], "a byte came late"
    if play.grant and lives[0]:
        check_gives_nothing(play.grant, source, destination)
    check_serves(source, destination)
    check_serves(destination, source)
    check_transports(case, [*source.transports(), *destination.transports()])
