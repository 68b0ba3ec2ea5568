"""Plays all cases through the executors of all languages."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .cases import Case
from .executor import Executor, ExecutorFailedError
from .languages import ROOT, Language, failing
from .play import Failure, Player
from .servers import ServerFailedError
from .stage import Stage


def silent(_: str) -> None:
    """Drops a line of progress."""


CASE_S = 120.0
"""Time limit of one case in seconds, whatever it waits for."""
STAGES_MAX = 3
"""Largest number of groups whose servers run at the same time."""


@dataclass
class Outcome:
    """Result of one case in one language."""

    case: Case
    failure: str = ""
    seconds: float = 0.0


@dataclass
class LanguageRun:
    """Results of all cases of one language; `why` says why there are none."""

    language: str
    version: str = ""
    outcomes: list[Outcome] = field(default_factory=list)
    why: str = ""

    @property
    def failed(self) -> int:
        return sum(bool(outcome.failure) for outcome in self.outcomes)


class Stages:
    """Servers of groups of cases. The group whose last use is oldest makes room for a new one."""

    def __init__(self, folder: Path, told: Callable[[str], None]) -> None:
        self._folder, self._told = folder, told
        self._stages: dict[str, Stage] = {}
        self._count = 0

    async def of(self, case: Case) -> Stage:
        """Returns the servers of a case. Raises ServerFailedError."""
        if not case.own and case.group in self._stages:
            self._stages[case.group] = stage = self._stages.pop(case.group)
            return stage
        while not case.own and len(self._stages) >= STAGES_MAX:
            await self._stages.pop(next(iter(self._stages))).close()
        self._count += 1
        stage = Stage(case, self._folder / f"stage-{self._count}")
        try:
            await stage.start()
        except BaseException:
            await stage.close()
            raise
        if not case.own:
            self._stages[case.group] = stage
        return stage

    async def give_back(self, case: Case, stage: Stage, allocations: list[tuple[str, str]]) -> None:
        """Takes servers back after a case. Servers that the case has changed for good are not used again."""
        left = "" if case.own else await stage.tidy(allocations)
        if left:
            self._told(
                f"{case.name} left its servers as they are not to be, they are started anew: {left}\n{stage.logs()}"
            )
            del self._stages[case.group]
        if left or case.own:
            await stage.close()

    async def close(self) -> None:
        """Ends all servers."""
        await asyncio.gather(*(stage.close() for stage in self._stages.values()))
        self._stages.clear()


@dataclass
class Run:
    """One run of the suite."""

    cases: Sequence[Case]
    folder: Path
    """Folder for logs and settings."""
    build: bool = True
    told: Callable[[str], None] = silent
    """Receives a line for every case, as it ends."""

    async def languages(self, languages: Sequence[Language]) -> list[LanguageRun]:
        """Plays the languages one after the other."""
        stages = Stages(self.folder, self.told)
        try:
            return [await self.language(language, stages) for language in languages]
        finally:
            await stages.close()

    async def language(self, language: Language, stages: Stages) -> LanguageRun:
        """Plays all cases of one language."""
        run = LanguageRun(language.name)
        run.why = language.missing() or (await failing(language, language.fetch) if self.build else "")
        broken = await failing(language, language.build) if self.build and not run.why else ""
        if broken:
            run.outcomes = [Outcome(case, f"not played: {broken}") for case in self.cases]
            self.told(f"{language.name}: {broken}")
            return run
        run.why = run.why or language.unbuilt()
        if run.why:
            self.told(f"{language.name}: SKIP: {run.why}")
            return run
        executor = self._executor(language)
        try:
            hello = await executor.start()
            run.version = str(hello.get("version", ""))
            for case in self.cases:
                outcome = await self._case(case, stages, executor)
                run.outcomes.append(outcome)
                self.told(
                    f"{language.name} {outcome.seconds:6.2f} s {'FAILED' if outcome.failure else 'ok':6} {case.name}"
                )
                if outcome.failure.startswith(_STUCK):
                    await executor.close()
                    executor = self._executor(language)
                    await executor.start()
        except ExecutorFailedError as error:
            run.outcomes += [Outcome(case, f"not played: {error}") for case in self.cases[len(run.outcomes) :]]
        finally:
            status = await executor.close()
        if status and not run.failed:
            run.outcomes[-1].failure = f"the executor ended with status {status}, not 0, when its input ended"
        return run

    def _executor(self, language: Language) -> Executor:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        return Executor(language.command, language.folder, self.folder / f"{language.name}.log", {"PYTHONPATH": path})

    async def _case(self, case: Case, stages: Stages, executor: Executor) -> Outcome:
        began = time.monotonic()
        try:
            stage = await stages.of(case)
        except ServerFailedError as error:
            return Outcome(case, f"{case.name}: {error}", time.monotonic() - began)
        stage.mark_logs()
        player = Player(case, stage, executor)
        failure: Failure | str | None
        try:
            failure = await asyncio.wait_for(player.play(), CASE_S)
        except TimeoutError:
            failure = f"{_STUCK}: {case.name} took more than {CASE_S:g} s"
        text = "" if failure is None else f"{failure}\n{stage.logs()}".rstrip()
        if isinstance(failure, Failure) and any("executor" in problem for problem in failure.problems):
            text = f"{_STUCK}: {text}"
        await stages.give_back(case, stage, player.allocations)
        return Outcome(case, text, time.monotonic() - began)


_STUCK = "the executor is stuck"
