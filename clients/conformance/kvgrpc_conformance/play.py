"""Plays one case, step by step, on its servers and through one executor."""

import asyncio
import json
import secrets
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from . import schema
from .cases import Case, connected, op_of
from .executor import Executor, ExecutorFailedError
from .matching import mismatches
from .stage import Stage
from .values import CaseError, Json, at, fill

CALL_S = 10.0
"""Time limit of a step that states none, in seconds."""
MARGIN_S = 20.0
"""Seconds beyond a step's time limit after which the executor counts as stuck."""
PAUSE_S = 0.1
"""Pause in seconds between two attempts of a step that is repeated until it is as expected."""
SHOWN = 2_000
"""Largest number of characters of a request or an answer that a failure shows."""


@dataclass
class Failure:
    """Why a case failed: the step, the request, the answer, and what was wrong with it."""

    case: str
    step: int
    what: str
    request: Json
    answer: Json
    problems: list[str]

    def __str__(self) -> str:
        lines = [f"{self.case}: step {self.step}, {self.what}", f"  request: {_short(self.request)}"]
        lines += [f"  answer:  {_short(self.answer)}", *(f"  wrong:   {problem}" for problem in self.problems)]
        return "\n".join(lines)


@dataclass
class Player:
    """Plays one case."""

    case: Case
    stage: Stage
    executor: Executor
    variables: dict[str, Json] = field(default_factory=dict)
    allocations: list[tuple[str, str]] = field(default_factory=list)
    """Allocations by server, which are freed after the case."""
    _started: dict[str, asyncio.Task[Json]] = field(default_factory=dict)

    async def play(self) -> Failure | None:
        """Returns why the case failed, or None."""
        self.variables |= {name: b64encode(secrets.token_bytes(16)).decode() for name in ("key", "key2", "key3")}
        self.variables |= {"id": secrets.token_hex(4), **self.stage.variables()}
        number, step = -1, dict[str, Json]()
        try:
            for name in self.stage.clients():
                step = {"connect": name, **self.stage.settings(name)}
                failure = self._judged({}, number, await self._done(step))
                if failure:
                    return failure
            for number, step in enumerate(self.case.steps):
                failure = await self._step(number, step)
                if failure:
                    return failure
        except (CaseError, ExecutorFailedError) as error:
            return Failure(self.case.name, number, op_of(step), step, None, [str(error)])
        finally:
            for task in self._started.values():
                task.cancel()
            await asyncio.gather(*self._started.values(), return_exceptions=True)
            await self._close()
        return None

    async def _step(self, number: int, step: dict[str, Json]) -> Failure | None:
        if "set" in step:
            self.variables |= fill(step["set"], self.variables)
            return None
        until = asyncio.get_running_loop().time() + step.get("withinS", 0.0)
        while True:
            failure = self._judged(step, number, await self._done(step))
            if failure is None or asyncio.get_running_loop().time() >= until:
                return failure
            await asyncio.sleep(PAUSE_S)

    async def _done(self, step: dict[str, Json]) -> Json:
        """Returns the answer to a step."""
        op = op_of(step)
        if op == "join":
            task = self._started.pop(step["join"], None)
            if task is None:
                raise CaseError(f"nothing was started as {step['join']}")
            return await task
        if op == "server":
            return await self.stage.act(fill(step["server"], self.variables))
        if op == "file":
            return await asyncio.to_thread(_write, fill(step, self.variables))
        request, timeout_s = self._request(op, step)
        if "start" in step:
            self._started[step["start"]] = asyncio.create_task(self._ask(request, timeout_s))
            await asyncio.sleep(0)  # the request goes out before the next step
            return {"started": True, "request": request}
        return await self._ask(request, timeout_s)

    def _request(self, op: str, step: dict[str, Json]) -> tuple[dict[str, Json], float]:
        """Returns the request to the executor."""
        filled = {name: fill(value, self.variables) for name, value in step.items() if name not in _OURS}
        subject = _SUBJECTS.get(op, op)
        request = {"op": op, **{name: value for name, value in filled.items() if name != op}}
        if op in ("call", "open", "redacted"):
            request |= {"method": schema.full_name(filled[op]), "request": filled.get("request", {})}
            if op == "open" and "request" not in step:
                del request["request"]
        else:
            request[subject] = filled[op]
        if op == "connect":
            request["address"] = self.stage.clients()[request.pop("to", filled[op])]
        for kind in ("stream", "keeper"):  # a unique name: the last case's may not be closed yet
            if kind in request:
                request[kind] = f"{self.variables['id']}-{request[kind]}"
        timeout_s = filled.get("timeoutS", filled.get("deadlineS", CALL_S))
        return request, float(timeout_s) + MARGIN_S

    async def _ask(self, request: dict[str, Json], timeout_s: float) -> Json:
        answer = await self.executor.ask(request, timeout_s)
        if request["op"] == "call" and request["method"].endswith("/AllocateBlocks"):
            allocation = at(answer, "ok.reply.blocks.allocationId")
            if allocation:
                self.allocations.append((request["server"], allocation))
        if request["op"] == "move":
            allocation = at(answer, "ok.blocks.allocationId")
            if allocation:
                self.allocations.append((request["to"], allocation))
        return {**answer, "request": request}

    def _judged(self, step: dict[str, Json], number: int, answer: Json) -> Failure | None:
        """Returns what is wrong with an answer. Saves what the step wants to keep."""
        if answer.get("started"):
            return None
        request, ok, error = answer.get("request", step), answer.get("ok"), answer.get("error")
        if "error" in step:
            problems = ["it was answered, where an error is expected"] if error is None else []
            problems += mismatches(fill(step["error"], self.variables), error, "error") if error is not None else []
            problems += schema.unknown_paths(request, error) if self.stage.is_real(step.get("server", "")) else []
        else:
            expected = fill(step.get("expect", {}), self.variables)
            problems = _unexpected(op_of(step), expected, ok) if ok is not None else ["it failed"]
        if not problems:
            for name, path in step.get("save", {}).items():
                self.variables[name] = at(error if "error" in step else ok, path)
            return None
        note = step.get("note", "")
        what = f"{op_of(step) or 'connect'} {step.get(op_of(step), '')}{f' ({note})' if note else ''}"
        return Failure(self.case.name, number, what, request, error if error is not None else ok, problems)

    async def _close(self) -> None:
        """Lets the executor forget the servers. Its answer to that is not judged."""
        for name in self.stage.clients().keys() | connected(self.case):
            try:
                await self.executor.ask({"op": "close", "server": name}, MARGIN_S)
            except ExecutorFailedError:
                return


_OURS = {"save", "expect", "error", "withinS", "start", "note"}
_SUBJECTS = {
    "send": "stream", "finish": "stream", "next": "stream", "cancel": "stream", "wait": "transferId",
    "watch": "stream", "watchEngine": "stream", "keepAlive": "keeper", "kept": "keeper", "stopKeeping": "keeper",
    "cleanUp": "sides", "pull": "request", "move": "request", "connect": "server", "close": "server",
}  # fmt: skip
"""Names of a step's main field in the executor's protocol, by op."""


def _write(step: dict[str, Json]) -> Json:
    Path(step["file"]).write_text(step["text"])
    return {"ok": {}}


def _unexpected(op: str, expected: dict[str, Json], ok: Json) -> list[str]:
    """Returns what is wrong with an answer that is not an error."""
    # A message with only default values equals a missing one, so whether it is there is checked separately.
    if op == "next" and not {"timeout", "end"} & expected.keys() and "message" not in ok:
        return [f"there is no message: {ok!r}"]
    return mismatches(expected, ok, "")


def _short(value: Mapping[str, Json] | Json) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text)} characters)"
