"""Tells on standard error how far a run is."""

import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress as Bar,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

LINE_S = 5.0
"""Seconds after which a pipe gets another line about a long step."""


def left_s(steps: int, done: int, finished_s: float, passed_s: float) -> float | None:
    """Returns the seconds that a run has left; None before its first step is done.

    `done` steps took `finished_s`. The step under way counts as one of their mean length, or as one that ends now if it
    has already taken longer.
    """
    if done <= 0:
        return None
    mean_s = max(finished_s / done, passed_s / (done + 1))
    return max(mean_s * steps - passed_s, 0.0)


class Told:
    """Progress of one run: a bar on a terminal, lines in a pipe."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.begun = 0
        """Number of steps that have begun."""
        self._what = "starting"
        self._began = self._step_began = time.monotonic()
        self._ended = threading.Event()
        terminal = sys.stderr.isatty()
        self._lines = not terminal
        self._bar = Bar(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
            _Left(self), console=Console(stderr=True), disable=not terminal,
        )  # fmt: skip
        self._task = self._bar.add_task(self._what, total=steps)
        self._beat = threading.Thread(target=self._again, daemon=True)

    @property
    def done(self) -> int:
        """Number of steps that are done."""
        return max(self.begun - 1, 0)

    @property
    def percent(self) -> int:
        """Share of the steps that are done; 100 only at the end."""
        return 100 if self._ended.is_set() else min(self.done * 100 // max(self._steps, 1), 99)

    def left(self) -> str:
        """Returns how long the run still takes, for people; "" if nothing is known yet."""
        now = time.monotonic()
        seconds = left_s(self._steps, self.done, self._step_began - self._began, now - self._began)
        if seconds is None or self._ended.is_set():
            return ""
        return f"about {seconds:.0f} s left" if seconds < 100 else f"about {seconds / 60:.0f} min left"

    def __enter__(self) -> "Told":
        self._bar.start()
        if self._lines:
            self._beat.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if kind is None:
            self._what = "measured"
            self._ended.set()
            self._bar.update(self._task, completed=self._steps, description=self._what)
            self._line()
        self._ended.set()
        self._bar.stop()

    def __call__(self, what: str) -> None:
        """Begins a step; the one before is done."""
        self.begun += 1
        self._step_began = time.monotonic()
        self._what = f"step {self.begun} of {self._steps}: {what}"
        self._bar.update(self._task, completed=self.done, description=self._what)
        self._line()

    def note(self, what: str) -> None:
        """Says something that is no step."""
        if self._lines:
            print(f"note: {what}", file=sys.stderr, flush=True)
        else:
            self._bar.console.print(f"note: {what}", highlight=False, markup=False)

    def _again(self) -> None:
        while not self._ended.wait(LINE_S):
            self._line()

    def _line(self) -> None:
        if self._lines:
            left = self.left()
            passed = f"{time.monotonic() - self._began:.0f} s{left and ', '}{left}"
            print(f"{self.percent:3} % {self._what} ({passed})", file=sys.stderr, flush=True)


class _Left(ProgressColumn):
    """Column of the bar that says how long the run still takes."""

    def __init__(self, told: Told) -> None:
        super().__init__()
        self._told = told

    def render(self, task: Task) -> Text:  # noqa: ARG002 - rich gives each column the task
        return Text(self._told.left())
