"""Any victim is killed, stopped or cut off, at any step, over any data path.

For the survivors this must hold: their transfer ends within its bounds, and memory that they do not get back names its
missing proof. What they then write into their blocks stays intact, whatever the victim does when it goes on. At the end
neither side holds anything, the next request is served, and a grant of an ended life gives nothing.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvgrpc.core.values.limits import Limits
from tests.chaos.cast import LIMITS, MEMBERS, PATIENT, SLOW_BYTES_PER_S, WRITTEN, Player, Setting
from tests.chaos.network import NAMESPACE
from tests.chaos.play import (
    BLOCKS,
    ENDS,
    KV,
    MIDWAY,
    NEW,
    NEXT,
    SETTLE,
    STEPS,
    TARGET,
    TOKENS,
    Play,
    bound_s,
    check_over,
    check_serves,
)
from tests.e2e.conftest import PATHS
from tests.engine.support import Workers

TEST_S = 180
VICTIMS = [(who, part) for who in ("P", "D") for part in MEMBERS]
NETWORK = ("", "network")
PAUSE_S = 1.0
"""Pause in seconds: longer than the bytes take, and far shorter than any limit of PATIENT."""


@dataclass(frozen=True)
class Case:
    path: str
    mode: str
    step: str
    who: str
    part: str
    deed: str

    @property
    def victim(self) -> str:
        return f"{self.who} {self.part}".strip()

    @property
    def key(self) -> tuple[str, ...]:
        return self.path, self.mode, self.step, self.victim, self.deed

    @property
    def name(self) -> str:
        return f"{self.path}, {self.mode}, {self.step}: {self.victim} {self.deed}"

    @property
    def setting(self) -> Setting:
        written = self.mode.startswith("written")
        limits = PATIENT if self.deed == "paused" else WRITTEN if written else LIMITS
        # A lead held before the settle must not be declared dead while the bytes move.
        return Setting(self.path, limits, written, SLOW_BYTES_PER_S * (3 if self.step == SETTLE else 1))

    @property
    def rekeys(self) -> bool:
        """True if a sound destination gets its blocks back without its peer. With CMA nothing proves that a stopped
        peer writes no more.
        """
        return self.mode.startswith("written") and self.path == "nixl-tcp"

    @property
    def keeps_doubt(self) -> bool:
        """True if a destination waits for its peer's word, or for the end of the process that writes. A peer that took
        it for dead gives that word when they meet again; a peer that is gone never does.
        """
        return self.mode.startswith("written") and self.path == "nixl"


def deeds(step: str) -> Iterator[tuple[str, str, str]]:
    """Yields (who, part, deed) for each fault at this step."""
    for who, part in VICTIMS:
        single = len(MEMBERS[part]) == 1
        if single or step == MIDWAY:
            yield who, part, "killed"
        if single:
            yield who, part, "stopped"
        if single and step == MIDWAY:
            yield who, part, "paused"
    yield *NETWORK, "cut"
    if step == MIDWAY:
        yield *NETWORK, "paused"


def cases() -> Iterator[Case]:
    for path in PATHS:
        for mode, steps in STEPS.items():
            # Without a network device a re-key cannot make a new agent.
            written = mode.startswith("written")
            if not written or (path.startswith("nixl") and not NAMESPACE):
                for step in steps:
                    for deed in deeds(step):
                        yield Case(path, mode, step, *deed)


QUICK = {
    ("shm", "pull", "before they have met", "P scheduler", "stopped"),
    ("shm", "pull", MIDWAY, "P lead and engine", "killed"),
    ("shm", "push", "between two parts", "D lead", "stopped"),
    ("shm", "layers", "between two layers", "P scheduler", "killed"),
    ("shm", "layers", MIDWAY, "D lead and engine", "killed"),
    ("window", "pull", MIDWAY, "P worker", "killed"),
    ("window", "push", MIDWAY, "D lead", "stopped"),
    ("cma", "pull", SETTLE, "D lead", "killed"),
    ("cma", "push", MIDWAY, "D engine", "killed"),
    ("cma", "layers", MIDWAY, "D worker", "stopped"),
    ("nixl", "pull", "waiting for blocks", "P lead", "stopped"),
    ("nixl", "push", SETTLE, "D scheduler", "killed"),
    ("nixl", "written push", MIDWAY, "P engine", "killed"),
    ("nixl-tcp", "written layers", MIDWAY, "P worker", "stopped"),
    ("nixl-tcp", "push", "registered", "P lead", "killed"),
    ("nixl-tcp", "push", MIDWAY, "P worker", "paused"),
    ("nixl-tcp", "layers", SETTLE, "P scheduler", "stopped"),
    ("nixl-tcp", "pull", MIDWAY, "network", "cut"),
    ("collective", "pull", MIDWAY, "network", "cut"),
    ("collective", "pull", SETTLE, "P worker", "killed"),
    ("collective", "push", MIDWAY, "P worker", "stopped"),
    ("collective", "layers", MIDWAY, "D worker", "killed"),
}
"""Cases that run with all tests: they cover every data path, mode, step, victim and deed."""


def marked(case: Case) -> object:
    return pytest.param(case, id=case.name, marks=[] if case.key in QUICK else [pytest.mark.chaos, pytest.mark.slow])


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
        players = [Player(tmp_path, name, case.setting, actors) for name in ("P", "D")]
        for player in players:
            stack.callback(player.close)
        source, destination = (player.ready() for player in players)
        yield source, destination


def do(case: Case, source: Player, destination: Player) -> None:
    """Applies the fault of the case to the victim."""
    if (case.who, case.part) == NETWORK:
        source.cut()
        destination.cut()
        return
    victim = source if case.who == "P" else destination
    (victim.kill if case.deed == "killed" else victim.stop)(case.part)


def go_on(players: tuple[Player, Player]) -> None:
    """Continues what stands still, and mends what was cut."""
    for player in players:
        player.mend()
        player.resume()


def check_gives_nothing(grant: str, source: Player, destination: Player, limits: Limits) -> None:
    """Checks that a grant of an ended life gives nothing: its address and blocks are the same, their content is not."""
    source.paint(BLOCKS, NEXT)
    destination.ask("pull", name="old", grant=grant, tokens=TOKENS)
    destination.ask("start", name="old", blocks=TARGET)
    assert check_over(destination, "old", bound_s("pull", limits)) == "BlocksReturned"


def check_transports(case: Case, found: list[str]) -> None:
    """Checks that the bytes used the transport of the case."""
    assert found
    if case.path == "nixl-tcp":
        assert all("tcp" in transport and "cma" not in transport for transport in found), found


def end_of(play: Play, player: Player, *, proved: bool = False) -> str:
    """Returns the last event of a player's transfer. Checks that received bytes are the source's KV, complete."""
    end = check_over(player, play.name, bound_s(play.mode, play.limits), proved=proved)
    assert end != "Received" or not player.sound("worker") or player.see(TARGET) == [KV]
    return end


def paint_what_is_back(case: Case, play: Play) -> dict[str, list[int]]:
    """Lets each engine that has its blocks back overwrite them. Returns these blocks, by engine."""
    kept = {}
    for player, blocks in ((play.source, BLOCKS), (play.destination, TARGET)):
        if player.sound("lead", "scheduler") and play.knows(player):
            proved = case.rekeys and player is play.destination and player.sound("worker")
            if end_of(play, player, proved=proved) in ENDS and player.sound("worker"):
                player.paint(blocks, NEW)
                kept[player.name] = blocks
    return kept


def check_nothing_came_late(play: Play, kept: dict[str, list[int]], lives: list[bool]) -> None:
    """Checks that no late byte reached returned blocks and that, if the source writes, none was read from them."""
    for player in (play.source, play.destination):
        if player.name in kept:
            assert player.see(kept[player.name]) == [NEW], "a byte came late"
    if play.written and "P" in kept and "D" not in kept and not lives[1]:
        assert {0, KV}.issuperset(play.destination.see(TARGET)), "its own write read what the source had back"


@pytest.mark.timeout(TEST_S)
@pytest.mark.parametrize("case", [marked(case) for case in cases()])
def test_who_survives_is_never_wrong_and_never_stuck(case: Case, cast: tuple[Player, Player]) -> None:
    source, destination = cast
    limits = case.setting.limits
    play = Play(source, destination, case.mode, limits)
    play.bring_to(case.step)
    do(case, source, destination)
    play.go_on()
    if case.deed == "paused":
        time.sleep(PAUSE_S)
        go_on(cast)
        assert end_of(play, destination) == "Received", "it stood still within all bounds"
    kept = paint_what_is_back(case, play)
    go_on(cast)
    lives = [player.revive(fresh=case.keeps_doubt) for player in cast]
    if case.keeps_doubt and case.part in ("lead", "network") and not any(lives):
        source.meet(destination)
    for player, new_life in zip(cast, lives, strict=True):
        player.wait_at_rest()
        if not new_life and play.knows(player) and player.name not in kept:
            assert end_of(play, player) in ENDS, "what was in quarantine has not come back"
    check_nothing_came_late(play, kept, lives)
    if play.grant and lives[0]:
        check_gives_nothing(play.grant, source, destination, limits)
    check_serves(source, destination, limits)
    check_serves(destination, source, limits)
    check_transports(case, [*source.transports(), *destination.transports()])


@pytest.mark.skipif(NAMESPACE, reason="only cuts run there")
def test_the_short_form_has_every_path_mode_step_victim_and_deed() -> None:
    whole, quick = list(cases()), [case for case in cases() if case.key in QUICK]
    assert len(quick) == len(QUICK), "one of them is no case"
    for what in (
        lambda case: case.path,
        lambda case: (case.mode.removeprefix("written "), case.step),
        lambda case: case.mode,
        lambda case: case.victim,
        lambda case: case.deed,
    ):
        assert {what(case) for case in quick} == {what(case) for case in whole}
