"""`python -m sim`: many engines in virtual time, from seeds, with every possible failure; all rules are checked."""

import gc
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from sim import Outcome, Setup, Violation

STEPS = 5_000
STOPS = (signal.SIGINT, signal.SIGTERM)
PROGRESS_S = 30.0
SHRINK_S = 60.0
"""Maximum time to make a world smaller before the result is shown, in seconds."""
WORKER_STEPS = 100_000
"""Number of steps of one process before the next world begins in a new one; about 200 MB."""


@dataclass(frozen=True)
class WorldKind:
    """The kind of worlds that are run."""

    steps: int
    liars: bool = False
    unlike: bool = False
    mirrors: bool = False
    collective: bool = False
    strangers: bool = False
    rings: bool = False
    digest: bool = False

    def check(self) -> None:
        """Raises typer.BadParameter for kinds that do not go together."""
        if self.liars and self.unlike:
            raise typer.BadParameter("not with --liars", param_hint="--unlike")
        if self.rings and (self.liars or self.unlike or self.mirrors or self.collective or self.strangers):
            raise typer.BadParameter("goes alone", param_hint="--rings")

    def setup(self, seed: int) -> "Setup":
        """Returns the world of a seed."""
        from sim import drawn

        options = asdict(self)
        del options["digest"]
        return drawn(seed, **options)


@dataclass
class Report:
    """The results of many worlds."""

    first_seed: int
    outcome: "Outcome"
    seconds: float = 0.0
    processor_s: float = 0.0
    done: set[int] = field(default_factory=set)

    @property
    def next_seed(self) -> int:
        """The first seed that was not run."""
        return next(seed for seed in count(self.first_seed) if seed not in self.done)


def sim(  # noqa: PLR0913, PLR0917 - one argument per option, all by name
    first_seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    seeds: Annotated[int, typer.Option(help="How many worlds; 0: as many as --seconds allows.")] = 20,
    steps: Annotated[int, typer.Option(help="Events in each world, before it comes to its end.")] = STEPS,
    seconds: Annotated[float, typer.Option(help="No world begins later than this; 0: no bound.")] = 0.0,
    jobs: Annotated[int, typer.Option(help="Worlds at once; 0: one for each processor.")] = 1,
    seed: Annotated[int | None, typer.Option(help="This one world only.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Replay --seed, and show what led to its violation.")] = False,
    liars: Annotated[bool, typer.Option("--liars", help="In each world one lead lies to the others.")] = False,
    unlike: Annotated[
        bool,
        typer.Option("--unlike", help="In each world engines have 1, 2 or 4 ranks, and exchange blocks by bridges."),
    ] = False,
    mirrors: Annotated[
        bool, typer.Option("--mirrors", help="In each world no data path reaches the memory of some engines.")
    ] = False,
    collective: Annotated[
        bool, typer.Option("--collective", help="In each world bytes move only when the source's rank sends, too.")
    ] = False,
    strangers: Annotated[bool, typer.Option("--strangers", help="Somebody names what is not its own.")] = False,
    rings: Annotated[
        bool, typer.Option("--rings", help="In each world engines prefill for each other, and wait for blocks.")
    ] = False,
    digest: Annotated[
        bool, typer.Option("--digest", help="Also print a digest of all that happened in each world.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    scenario: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Replay a scenario file, and print what is seen.")
    ] = None,
) -> None:
    """Run worlds of many engines in virtual time, each from its seed, and check every rule in them.

    Messages are late, lost, doubled and reordered; links break; leads, ranks and engines crash at any step or are
    stopped; data paths stall, fail, and write after an error; schedulers abort, preempt, and mix up grants. The same
    seed with the same steps is the same world, on every machine. steps_per_s is events for each second of processor
    time: what one core does. The digest of a world stays the same for as long as every lead decides the same in it: two
    versions of the code with equal digests (--digest --json) differ in nothing but their shape.

    With --liars one lead of each world says what is false: blocks, ids, epochs, layouts and verdicts of its own making,
    in answers, in requests and unasked. Every rule holds for all others. With --unlike the engines of a world have 1, 2
    or 4 ranks each, of a model with two heads, some of them in two pipeline stages, and what they exchange is bridged.
    With --mirrors, which goes with either, the memory of some engines is reached by way of mirrors only. With
    --collective, which goes with all, ranks of sources send, each time that the destination's lead asks theirs. With
    --strangers, which goes with all, a caller names what belongs to engines, and is refused. With --rings, which goes
    alone, each engine prefills for the next one, all requests come at once, and no pool has room for all: every request
    gets its answer, the oldest of all within a bounded time.

    Exit codes: 0 every rule held; 1 one did not; 2 an option is not usable.
    """
    if scenario is not None:
        raise typer.Exit(_replay_scenario(scenario))
    kind = WorldKind(steps, liars, unlike, mirrors, collective, strangers, rings, digest)
    kind.check()
    if trace:
        if seed is None:
            raise typer.BadParameter("which world? add --seed", param_hint="--trace")
        raise typer.Exit(_replay(seed, kind))
    if seeds <= 0 and seconds <= 0 and seed is None:
        raise typer.BadParameter("takes a number above 0, or --seconds", param_hint="--seeds")
    first, most = (first_seed, seeds) if seed is None else (seed, 1)
    report = _run(first, most, kind, seconds, jobs or os.cpu_count() or 1)
    if as_json:
        typer.echo(json.dumps(to_json(report, kind)))
    else:
        show(report, kind)
    raise typer.Exit(1 if report.outcome.violations else 0)


def _replay_scenario(path: Path) -> int:
    """Prints the file with the present results of its commands. Returns 1 if they differ from the file's, else 0."""
    from sim.script import ScriptError, replay

    text = path.read_text()
    try:
        seen = replay(text)
    except (ScriptError, AssertionError) as error:
        typer.echo(f"python -m sim: {path}: {error}", err=True)
        return 1
    typer.echo(seen, nl=False)
    if seen != text:
        typer.echo(f"python -m sim: {path} says something else", err=True)
    return int(seen != text)


class Worker:
    """A process that runs worlds one after another.

    The end of the process frees them at once, while a garbage collection would visit every object. Not every world gets
    a process of its own: the first world of a process copies most of the memory it shares with its parent.
    """

    def __init__(self, kind: WorldKind) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(
            target=_work, args=(theirs, self.connection, kind), daemon=True
        )
        # An exception raised while a process is made is lost: functions called at a fork may not raise.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        theirs.close()
        self._seed = 0
        self._steps = 0

    @property
    def spent(self) -> bool:
        """True when freeing its memory is worth a new process."""
        return self._steps >= WORKER_STEPS

    def begin(self, seed: int) -> None:
        """Makes it run a world."""
        self._seed = seed
        self.connection.send(seed)

    def result(self) -> tuple[int, "Outcome", float]:
        """Waits for the world to end. Returns its seed, its outcome, and its processor time in seconds."""
        try:
            outcome, processor_s = self.connection.recv()
        except EOFError:
            from kvgrpc.engine.session.exits import ended_with

            self._process.join()
            how = ended_with(self._process.exitcode or 0)
            raise RuntimeError(f"the process of seed {self._seed} ended with {how} and without a result") from None
        self._steps += outcome.steps
        return self._seed, outcome, processor_s

    def end(self) -> None:
        """Ends the process. Call it only between two worlds."""
        self.connection.send(None)
        self._process.join()
        self.connection.close()


def _work(connection: Connection, parents: Connection, kind: WorldKind) -> None:
    from sim import digested, run

    parents.close()  # so that this process ends when its parent does
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends ^C to all of its processes
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    gc.disable()
    with suppress(EOFError):
        for seed in iter(connection.recv, None):
            began = time.process_time()
            outcome = (digested if kind.digest else run)(kind.setup(seed))
            connection.send((outcome, time.process_time() - began))


def to_json(report: Report, kind: WorldKind) -> dict[str, Any]:
    """Returns the report as JSON."""
    outcome = report.outcome
    return {
        "first_seed": report.first_seed,
        "seeds": len(report.done),
        "next_seed": report.next_seed,
        "steps": outcome.steps,
        "requests": outcome.requests,
        "virtual_s": round(outcome.virtual_s, 3),
        "faults": dict(sorted(outcome.faults.items())),
        "transfers": dict(sorted(outcome.ends.items())),
        "failures": {str(reason): n for reason, n in sorted(outcome.reasons.items())},
        "violations": [
            asdict(violation) | {"replay": _replay_command(violation, kind)} for violation in outcome.violations
        ],
        "digests": {seed: f"{value:08x}" for seed, value in sorted(outcome.digests.items())},
        "seconds": round(report.seconds, 3),
        "processor_s": round(report.processor_s, 3),
        "steps_per_s": round(outcome.steps / max(report.processor_s, 1e-9)),
    }


def show(report: Report, kind: WorldKind) -> None:
    """Prints the report for people, with the trace of the first violation."""
    from rich.console import Console
    from rich.table import Table

    found = to_json(report, kind)
    console = Console()
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name in ("seeds", "next_seed", "steps", "requests", "steps_per_s"):
        table.add_row(name, f"{found[name]:,}")
    for title in ("transfers", "faults"):
        table.add_row("", "")
        for name, number in found[title].items():
            table.add_row(name, f"{number:,}")
    console.print(table)
    for seed, value in found["digests"].items():
        typer.echo(f"seed {seed}: digest {value}")
    for violation in found["violations"]:
        typer.echo(f"\nseed {violation['seed']}, step {violation['step']}: {violation['rule']}: {violation['message']}")
        typer.echo(f"  {violation['replay']}")
    if report.outcome.violations:
        typer.echo()
        _replay(report.outcome.violations[0].seed, kind)
    else:
        typer.echo("\nno violations")


def _run(first: int, most: int, kind: WorldKind, seconds: float, jobs: int) -> Report:
    from sim import Outcome

    began = time.monotonic()
    report = Report(first, Outcome())

    def wanted() -> Iterator[int]:
        for seed in count(first) if most <= 0 else range(first, first + most):
            if seconds and time.monotonic() - began >= seconds:
                return
            yield seed

    said = began
    for seed, outcome, processor_s in _worlds(wanted(), jobs, lambda: Worker(kind)):
        report.done.add(seed)
        report.outcome.add(outcome)
        report.processor_s += processor_s
        now = time.monotonic()
        if outcome.violations or now - said >= PROGRESS_S:
            said = now
            _progress(report, outcome)
    report.outcome.violations.sort(key=lambda violation: violation.seed)
    report.seconds = time.monotonic() - began
    return report


def _progress(report: Report, outcome: "Outcome") -> None:
    """Prints the progress of a long run, and violations at once."""
    for violation in outcome.violations:
        typer.echo(f"seed {violation.seed}: {violation.rule}: {violation.message}", err=True)
    steps, violations = report.outcome.steps, len(report.outcome.violations)
    typer.echo(f"... {steps:,} steps, {violations} violations; go on with seed {report.next_seed}", err=True)


def _worlds(seeds: Iterator[int], jobs: int, make: Callable[[], Worker]) -> Iterator[tuple[int, "Outcome", float]]:
    """Yields worlds as they end; `jobs` run at once."""
    busy: list[Worker] = []

    def begin(worker: Worker, seed: int) -> None:
        worker.begin(seed)
        busy.append(worker)

    for seed in islice(seeds, jobs):
        begin(make(), seed)
    while busy:
        ready = wait([worker.connection for worker in busy])
        for worker in [worker for worker in busy if worker.connection in ready]:
            busy.remove(worker)
            yield worker.result()
            following = next(seeds, None)
            if following is None:
                worker.end()
            else:
                begin(_fresh(worker, make), following)


def _fresh(worker: Worker, make: Callable[[], Worker]) -> Worker:
    """Returns this worker, or a new one if it is spent."""
    if not worker.spent:
        return worker
    worker.end()
    return make()


def _replay_command(violation: "Violation", kind: WorldKind) -> str:
    flags = {
        " --liars": kind.liars,
        " --unlike": kind.unlike,
        " --mirrors": kind.mirrors,
        " --collective": kind.collective,
        " --strangers": kind.strangers,
        " --rings": kind.rings,
    }
    more = "".join(flag for flag, given in flags.items() if given)
    return f"python -m sim --seed {violation.seed} --steps {kind.steps}{more} --trace"


def _replay(seed: int, kind: WorldKind) -> int:
    """Replays one world, makes it smaller, and prints what led to its violation. Returns the exit code."""
    from sim import run
    from sim.seeds.shrink import shrink
    from sim.world.trace import Trace

    setup = kind.setup(seed)
    violations = run(setup).violations
    if not violations:
        typer.echo(f"seed {seed}: every rule holds in {kind.steps} steps")
        return 0
    typer.echo(f"seed {seed}: {violations[0].rule}: {violations[0].message}")
    until = time.monotonic() + SHRINK_S
    setup, violation = shrink(setup, violations[0], enough=lambda: time.monotonic() >= until)
    seen = Trace()
    run(setup, seen)
    typer.echo(f"smaller: {setup.describe()}; {setup.steps} steps")
    for line in seen.lines(violation.about):
        typer.echo(line)
    typer.echo(f"{violation.rule}: {violation.message}")
    return 1
