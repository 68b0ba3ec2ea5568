"""An engine whose lead is its own child survives the lead's death at any step, and continues with the next lead.

Transfers under way fail, and their blocks come back when they are at rest; later writes of the engine stay intact. Only
one case ends the engine itself: a peer that may write into its memory from a process that nobody can stop.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.chaos.cast import LIMITS, SLOW_BYTES_PER_S, WRITTEN, Launched, Setting
from tests.chaos.play import (
    BLOCKS,
    ENDS,
    KV,
    MIDWAY,
    NEW,
    SETTLE,
    STEPS,
    TARGET,
    Play,
    bound_s,
    check_over,
    check_serves,
)
from tests.e2e.conftest import PATHS
from tests.engine.support import Workers

TEST_S = 180
QUICK = {("nixl-tcp", "pull", MIDWAY, "D"), ("nixl", "written push", MIDWAY, "P")}


def cases() -> Iterator[object]:
    for path in PATHS:
        for mode, steps in STEPS.items():
            if path.startswith("nixl") or not mode.startswith("written"):
                for step in steps:
                    for who in ("P", "D"):
                        case = path, mode, step, who
                        marks = [] if case in QUICK else [pytest.mark.chaos, pytest.mark.slow]
                        yield pytest.param(*case, marks=marks, id=f"{path}, {mode}, {step}: {who}")


@pytest.fixture(scope="module")
def actors() -> Iterator[Workers]:
    made = Workers("tests.chaos.actor")
    yield made
    made.close()


@pytest.mark.timeout(TEST_S)
@pytest.mark.parametrize(("path", "mode", "step", "who"), list(cases()))
def test_an_engine_outlives_a_lead(tmp_path: Path, actors: Workers, path: str, mode: str, step: str, who: str) -> None:
    written = mode.startswith("written")
    limits = WRITTEN if written else LIMITS
    setting = Setting(path, limits, written, SLOW_BYTES_PER_S * (3 if step == SETTLE else 1))
    with ExitStack() as stack:
        players = [Launched(tmp_path, name, setting, actors) for name in ("P", "D")]
        for player in players:
            stack.callback(player.close)
        source, destination = (player.ready() for player in players)
        victim, survivor = (source, destination) if who == "P" else (destination, source)
        play = Play(source, destination, mode, limits)
        play.bring_to(step)
        victim.kill("lead")
        play.go_on()
        within_s, blocks, kept = bound_s(mode, limits), {"P": BLOCKS, "D": TARGET}, list[Launched]()
        cma = written and path == "nixl"
        doubted = cma and victim is destination
        for player in (victim, survivor):
            if not play.knows(player):
                continue
            proved = player is victim or (path == "nixl-tcp" and written)
            end = check_over(player, play.name, within_s, proved=proved)
            if player is victim:
                in_time = step == SETTLE and end == "Received"  # it had settled before its source was held
                assert in_time or end == ("LeadDied" if doubted else "BlocksReturned")
            assert end != "Received" or player.see(TARGET) == [KV]
            if end in ENDS:
                player.paint(blocks[player.name], NEW)
                kept.append(player)
        victim.come_back(anew=doubted)
        if cma and victim is source and destination not in kept:
            assert destination.quarantine(), "its new lead knows nothing of what the last one had written"
            assert source not in kept or source.see(BLOCKS) == [NEW]
            kept.clear()
            source.come_back(anew=True)  # a new process with other memory: the process that wrote has ended
        for player in players:
            player.wait_at_rest()
        for player in kept:
            assert player.see(blocks[player.name]) == [NEW], "a byte came late"
        if source in kept and destination not in kept and not doubted:
            assert not written or {0, KV}.issuperset(destination.see(TARGET)), "what came back was read"
        check_serves(source, destination, limits)
        check_serves(destination, source, limits)
