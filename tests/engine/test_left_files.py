"""Files that an engine with a lead of its own leaves behind when processes are killed: none for long."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.engine.support import EngineProcess, ended
from tests.service.conftest import TEST_S
from tests.service.engines import READY_S, wait_until

pytestmark = pytest.mark.timeout(TEST_S)

Launch = Callable[[], tuple[EngineProcess, int]]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yields a folder for temporary files. Its path is short, because socket paths have to be."""
    with tempfile.TemporaryDirectory() as made:
        monkeypatch.setenv("TMPDIR", made)
        yield Path(made)


@pytest.fixture
def launch(folder: Path) -> Iterator[Launch]:
    """Starts an engine with a lead of its own. Returns the engine and the lead's PID."""
    with ExitStack() as stack:

        def begin() -> tuple[EngineProcess, int]:
            process = EngineProcess("launch")
            stack.callback(process.close)
            return process, process.answer()["lead"]

        yield begin


def kill(pid: int) -> None:
    """Kills a process with SIGKILL and waits for its end."""
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert ended(pidfd)
    os.close(pidfd)


def test_an_engine_that_ends_takes_its_folder_along(folder: Path, launch: Launch) -> None:
    engine, _ = launch()
    assert len(list(folder.iterdir())) == 1
    engine.close()
    assert list(folder.iterdir()) == []


def test_a_lead_whose_engine_was_killed_removes_their_folder(folder: Path, launch: Launch) -> None:
    engine, lead = launch()
    lead_ends = os.pidfd_open(lead)
    forked = engine.ask(op="fork")  # the child outlives the engine, and must not count as the engine
    engine.kill()
    assert ended(lead_ends, READY_S)
    os.close(lead_ends)
    assert list(folder.iterdir()) == []
    os.kill(forked, signal.SIGKILL)


def test_what_was_left_when_both_were_killed_goes_with_the_next_start(folder: Path, launch: Launch) -> None:
    engine, lead = launch()
    (left,) = folder.iterdir()
    os.kill(lead, signal.SIGSTOP)
    engine.kill()
    kill(lead)
    assert list(folder.iterdir()) == [left]
    launch()
    (other,) = folder.iterdir()
    assert other != left


def test_nothing_of_a_living_engine_is_removed_even_between_two_leads(folder: Path, launch: Launch) -> None:
    engine, lead = launch()
    (home,) = folder.iterdir()
    kill(lead)
    launch()
    wait_until(lambda: engine.ask(op="poll") != lead and (home / "session.sock").exists(), READY_S)
    assert len(list(folder.iterdir())) == 2


def test_only_what_is_a_folder_of_a_lead_is_removed(folder: Path, launch: Launch) -> None:
    elsewhere, link, other = folder / "elsewhere", folder / "kvgrpc-lead-link", folder / "kvgrpc-other"
    for one in (elsewhere, other):
        one.mkdir()
    link.symlink_to(elsewhere)
    launch()
    assert elsewhere.exists()
    assert link.is_symlink()
    assert other.exists()
