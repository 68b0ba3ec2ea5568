"""Tells on standard error how far a run is."""

import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress as Bar,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LINE_S = 5.0
"""Seconds after which a pipe gets another line about a long step."""


class Told:
    """Progress of one run: a bar on a terminal, lines in a pipe."""

    def __init__(self, steps: int, *, quiet: bool) -> None:
        self._steps = steps
        self._done = -1
        self._what = "starting"
        self._began = time.monotonic()
        self._ended = threading.Event()
        terminal = sys.stderr.isatty()
        self._lines = not terminal and not quiet
        self._bar = Bar(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True), disable=not terminal,
        )  # fmt: skip
        self._task = self._bar.add_task(self._what, total=steps)
        self._beat = threading.Thread(target=self._again, daemon=True)

    @property
    def percent(self) -> int:
        """Share of the steps that are done; 100 only at the end."""
        if self._done >= self._steps:
            return 100
        return min(max(self._done, 0) * 100 // max(self._steps, 1), 99)

    def __enter__(self) -> "Told":
        self._bar.start()
        if self._lines:
            self._beat.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._ended.set()
        if kind is None:
            self._done = self._steps
            self._bar.update(self._task, completed=self._steps, description="measured")
            self._what = "measured"
            self._line()
        self._bar.stop()

    def __call__(self, what: str) -> None:
        """Begins a step; the one before is done."""
        self._done = min(self._done + 1, self._steps)
        self._what = what
        self._bar.update(self._task, completed=max(self._done, 0), description=what)
        self._line()

    def note(self, what: str) -> None:
        """Says something that is no step."""
        if self._lines:
            print(f"... {what}", file=sys.stderr, flush=True)
        else:
            self._bar.console.print(what) if not self._bar.disable else None

    def _again(self) -> None:
        while not self._ended.wait(LINE_S):
            self._line()

    def _line(self) -> None:
        if self._lines:
            passed = time.monotonic() - self._began
            left = (
                f", about {passed / self.percent * (100 - self.percent):.0f} s left" if 0 < self.percent < 100 else ""
            )
            print(f"{self.percent:3} % {self._what} ({passed:.0f} s{left})", file=sys.stderr, flush=True)
