"""Commands colour their output on a terminal, and not with NO_COLOR."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvgrpc.client import connect_sync
from tests.client.serving import served

COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3|4|9|10)[0-8](?:;\d+)*m")
"""A command to the terminal that sets the colour of letters or of what is behind them."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served("--engine-id", "P", "--drain-s", "0") as server, connect_sync(server.address) as client:
        client.allocate(1)
        yield server.address


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """Returns what a command writes to a terminal."""
    ours, theirs = pty.openpty()
    known = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "FORCE_COLOR"}}
    with subprocess.Popen(
        [sys.executable, "-m", "kvgrpc", *arguments], stdin=theirs, stdout=theirs, stderr=theirs,
        env=known | {"TERM": "xterm-256color"} | environment,
    ):  # fmt: skip
        os.close(theirs)
        written = b""
        try:
            while part := os.read(ours, 1 << 16):
                written += part
        except OSError:  # so Linux says that the other end is closed
            pass
    os.close(ours)
    return written.decode()


@pytest.mark.parametrize("command", ["doctor", "status", "--help"])
def test_colours_of_a_terminal_are_off_with_no_color(address: str, command: str) -> None:
    asked = (command,) if command == "--help" else (command, address)
    assert COLOUR.search(on_a_terminal(*asked))
    assert COLOUR.search(on_a_terminal(*asked, NO_COLOR=""))
    assert not COLOUR.search(on_a_terminal(*asked, NO_COLOR="1"))


@pytest.mark.parametrize(
    "command", [["drain", "--cancel"], ["get", "engines"], ["get", "pins"], ["why", "7"], ["trace", "0" * 32]]
)
def test_the_other_commands_have_no_colours(address: str, command: list[str]) -> None:
    assert not COLOUR.search(on_a_terminal(*command, address))
