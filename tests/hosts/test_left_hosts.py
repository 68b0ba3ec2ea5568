"""A run that is ended leaves no host, whatever ended it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.hosts import ip
from tests.service.engines import wait_until

RUN = """
import subprocess, sys
from tests.hosts import hosts
with hosts.two_hosts() as why_not:
    if why_not:
        print("SKIP", why_not, flush=True)
    else:
        inner = subprocess.Popen([*hosts.FIRST.within, "sleep", "600"])
        print(inner.pid, hosts.FIRST.name, hosts.SECOND.name, hosts.FIRST.way, hosts._OUTSIDE, flush=True)
        sys.stdin.read()
"""


def left(inner: str, one: str, other: str, way: str, outside: str) -> list[str]:
    """Returns what is left of a run."""
    places = {
        "process": Path(f"/proc/{inner}").exists() and "sleep" in Path(f"/proc/{inner}/cmdline").read_text(),
        one: one in ip("netns", "list").split(),
        other: other in ip("netns", "list").split(),
        way: f" {way}@" in ip("link", "list"),
        outside: f" {outside} " in ip("route", "list", "table", "local"),
    }
    return [name for name, there in places.items() if there]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_no_namespace_device_route_or_process(number: signal.Signals) -> None:
    command = [sys.executable, "-c", RUN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        made = run.stdout.readline().split()
        if made[0] == "SKIP":
            pytest.skip(" ".join(made[1:]))
        wait_until(lambda: len(left(*made)) == 5, what=lambda: left(*made))
        run.send_signal(number)
        run.wait(60)
    wait_until(lambda: not left(*made), what=lambda: left(*made))


def test_a_run_that_ends_by_itself_leaves_nothing_either() -> None:
    run = subprocess.run(
        [sys.executable, "-c", RUN.replace('"600"', '"0"')], input="", capture_output=True, text=True, check=True
    )
    made = run.stdout.split()
    if made[0] == "SKIP":
        pytest.skip(" ".join(made[1:]))
    assert left(*made) == []
