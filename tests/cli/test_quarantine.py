"""`kvgrpc release-quarantine`, and the key of `kvgrpc top`, on blocks that a stopped process may still write."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import run
from tests.cli.top.screens import has, screen, shows
from tests.e2e.conftest import PATHS
from tests.e2e.pushing import BLOCKS, LIMITS, MIDWAY, SLOW, Pushing, begin
from tests.service.conftest import starting
from tests.service.engines import QUARANTINED

WORD = "its host was switched off at 17:03"


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[Pushing]:
    """Yields a push whose source stands still, and whose destination has given it up. A re-key proves nothing here."""
    flags, environment = PATHS["nixl"]
    with starting(tmp_path) as start:
        source, destination = start(*[(*flags, *SLOW)] * 2, settings=f"source_writes = true\n{LIMITS}", **environment)
        made = begin(source, destination, MIDWAY)
        with source.process.stopped():
            assert destination.wait(made.received, returned=False).memory == QUARANTINED
            yield made
            source.process.kill()  # makes the operator's word true


async def test_a_key_of_the_screen_asks_and_tells_what_is_left(stopped: Pushing) -> None:
    async with screen(stopped.destination.address) as (app, pilot):
        await pilot.press("6")
        await shows(app, pilot, has(stopped.received))
        await pilot.press("k", "n")
        assert stopped.destination.counts().quarantined_block_count == BLOCKS
        await pilot.press("k", "y")
        await shows(app, pilot, has(f"0 blocks left quarantine; {BLOCKS} are still there"))


def test_what_no_proof_ends_is_an_error_and_force_wants_a_reason_and_a_yes(stopped: Pushing) -> None:
    destination = stopped.destination
    code, lines, said = run("release-quarantine", destination.address)
    assert (code, lines) == (1, [f"0 blocks are released; {BLOCKS} are still in quarantine"])
    assert f"kvgrpc get pins {destination.address}" in said
    for wrong in (("--force",), ("--message", WORD), ("--yes",), ("--transfer", stopped.received)):
        assert run("release-quarantine", destination.address, *wrong)[0] == 2, wrong
    forced = ("release-quarantine", destination.address, "--force", "--message", WORD, "--transfer", stopped.received)
    for answer in ("n\n", ""):
        assert run(*forced, given=answer)[0] == 1
    assert destination.counts().quarantined_block_count == BLOCKS
    code, lines, _ = run(*forced, "--json", given="y\n")
    assert (code, json.loads(*lines)["released_block_count"]) == (0, str(BLOCKS))
    assert f"{BLOCKS} blocks left quarantine at an operator's word: {WORD}\n" in destination.process.log
    assert run(*forced[:-2])[1] == ["0 blocks are released; 0 are still in quarantine"]
