"""The answers of commands to signals, and their messages about own processes that a signal ended."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from bench.stages.hosts import Host
from kvgrpc.engine import Engine, LeadDied, Rank
from kvgrpc.engine.session.rank_link import RankLink
from tests.docs.pages import ROOT
from tests.engine.made import layout
from tests.service.engines import EXIT_S, wait_until

STARTED_S = 90.0
COMMANDS = {
    "demo": (["examples.demo"], 5),
    "bench": (["bench", "pull", "--quick"], 3),
    "sim": (["sim", "--seeds", "0", "--seconds", "300"], 1),
}
"""Module and arguments of each command, and the number of processes it works with."""
FROM_SHELL = {signal.SIGTERM: 143, signal.SIGINT: 130}
pytestmark = pytest.mark.timeout(STARTED_S + 2 * EXIT_S)


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in found for child in task.read_text().split()]


@contextmanager
def running(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", FROM_SHELL)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_told_to_stop_ends_what_it_started(name: str, number: signal.Signals) -> None:
    arguments, count = COMMANDS[name]
    with running(*arguments) as process, ExitStack() as stack:
        wait_until(lambda: len(children(process.pid)) >= count, STARTED_S)
        pidfds = [os.pidfd_open(child) for child in children(process.pid)]
        for pidfd in pidfds:
            stack.callback(os.close, pidfd)
        process.send_signal(number)
        _, said = process.communicate(timeout=EXIT_S)
        assert process.returncode == FROM_SHELL[number]
        assert "Traceback" not in said
        deadline = time.monotonic() + EXIT_S
        for pidfd in pidfds:
            ended = select.poll()
            ended.register(pidfd, select.POLLIN)
            assert ended.poll(max(deadline - time.monotonic(), 0.0) * 1e3)


@pytest.mark.parametrize("number", FROM_SHELL)
def test_a_server_that_is_stopped_before_it_serves_ends_with_0(tmp_path: Path, number: signal.Signals) -> None:
    config = tmp_path / "config"
    os.mkfifo(config)
    with (
        running("kvgrpc", "serve", "--config", str(config)) as process,
        config.open("w"),
    ):  # opens when the server reads it
        process.send_signal(number)
        _, said = process.communicate(timeout=EXIT_S)
        assert (process.returncode, said) == (0, "")


def test_the_demo_says_which_of_its_processes_ended_how() -> None:
    def server_p(of: int) -> list[int]:
        return [child for child in children(of) if b"\0--engine-id\0P\0" in Path(f"/proc/{child}/cmdline").read_bytes()]

    with running("examples.demo") as process:
        wait_until(lambda: len(children(process.pid)) >= 5, STARTED_S)
        os.kill(server_p(process.pid)[0], signal.SIGKILL)
        _, said = process.communicate(timeout=STARTED_S)
        assert process.returncode == 1
        assert said.splitlines()[-1].startswith("demo: ")
        assert "server P ended with SIGKILL" in said


def test_an_engine_says_of_each_lead_how_it_ended(caplog: pytest.LogCaptureFixture) -> None:
    launched = Engine.launch(pool=layout(), flags=["--data-paths", "shm"], relaunches=1)
    with launched as engine, Rank(engine.ticket):  # the next life does not begin without a rank
        first, life = engine.lead_pid, engine.incarnation
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: bool(engine.poll()) or engine.incarnation != life, STARTED_S)
        assert f"process {first}, ended with SIGKILL" in caplog.text
        second = engine.lead_pid
        os.kill(second, signal.SIGKILL)
        with pytest.raises(LeadDied, match="SIGKILL"):
            wait_until(lambda: bool(engine.poll(1.0)), STARTED_S)
    assert f"process {second}, ended" not in caplog.text  # the error has already said it


def test_a_benchmark_says_which_of_its_processes_ended_how(caplog: pytest.LogCaptureFixture) -> None:
    host = Host("baseline")
    os.kill(host.pid, signal.SIGKILL)
    for _ in range(2):
        host.close()
    assert caplog.messages == ["the baseline process ended with SIGKILL"]


def test_a_rank_says_how_the_process_that_links_it_ended(caplog: pytest.LogCaptureFixture) -> None:
    link = RankLink("127.0.0.1:1")
    os.kill(link.pid, signal.SIGKILL)
    for _ in range(2):
        link.close()
    assert caplog.messages == ["the process that links this rank to its lead ended with SIGKILL"]
