"""Where a result goes: files that are checked before anything is measured, and the terminal."""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from bench.results.drawing import SUFFIXES, draw
from bench.results.pulls import Run
from bench.results.table import show

_PLACES = ("--output", "--plot")
"""Options that take a file for the result."""


@dataclass(frozen=True)
class Shown:
    """The forms in which a result is wanted."""

    json_: bool
    output: Path | None
    plot: Path | None
    targets: bool
    explain: bool

    @classmethod
    def checked(cls, json_: bool, output: Path | None, plot: Path | None, *, targets: bool, explain: bool) -> "Shown":
        """Returns the forms. Raises ValueError for a file that cannot be written."""
        if output is not None:
            check_file("--output", output)
        if plot is not None:
            check_picture("--plot", plot)
        return cls(json_, output, plot, targets, explain)

    def write(self, found: Run, command: Sequence[str]) -> None:
        """Writes the result of `command` in all its forms."""
        result = {
            "kind": found.kind,
            "command": shlex.join(repeatable(command)),
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            **found.to_json(),
        }
        text = json.dumps(result, indent=2)
        if self.output is not None:
            self.output.write_text(text + "\n")
        if self.plot is not None:
            draw(result, self.plot)
        if self.json_:
            print(text)
        else:
            show(found, console(), targets=self.targets, explain=self.explain)


def repeatable(command: Sequence[str]) -> list[str]:
    """Returns the command without the options that say where its result goes."""
    found, words = [], iter(command)
    for word in words:
        if word in _PLACES:
            next(words, None)
        elif word != "--json" and word.partition("=")[0] not in _PLACES:
            found.append(word)
    return found


def console() -> Console:
    """Returns the console of standard output, of 120 columns in a pipe."""
    return Console(width=None if sys.stdout.isatty() else 120)


def check_file(option: str, path: Path) -> None:
    """Raises ValueError if the file cannot be written."""
    if path.is_dir():
        raise ValueError(f"{option}: {path} is a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option}: cannot write {path}")


def check_picture(option: str, path: Path) -> None:
    """Raises ValueError if no picture can be drawn to the file."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{option}: {path} has to end in {' or '.join(SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise ValueError(f"{option}: needs matplotlib: pip install matplotlib")
    check_file(option, path)
