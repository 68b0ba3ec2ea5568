"""Runs one executor process: requests go out as lines, and answers come back in any order."""

import asyncio
import json
import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from .process import bound, stop, tail
from .values import Json

LINE_BYTES_MAX = 64 << 20
HELLO_S = 60.0
END_S = 10.0


class ExecutorFailedError(Exception):
    """Raised when the executor ended, sent an invalid answer, or sent none in time."""


class Executor:
    """A running executor."""

    def __init__(self, command: str, cwd: Path, log: Path, environment: Mapping[str, str]) -> None:
        self._command = shlex.split(command)
        self._cwd, self._log, self._environment = cwd, log, environment
        self._waiting: dict[int, asyncio.Future[Json]] = {}
        self._count = 0
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._why = "it is not started"

    async def start(self) -> Json:
        """Starts the executor, and returns what it says about itself. Raises ExecutorFailedError."""
        with self._log.open("ab") as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *bound(*self._command),
                    cwd=self._cwd,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    limit=LINE_BYTES_MAX,
                    env={**os.environ, **self._environment},
                )
            except OSError as error:
                raise ExecutorFailedError(f"{self._command[0]}: {error}") from error
        self._reading = asyncio.create_task(self._read())
        return (await self.ask({"op": "hello"}, HELLO_S)).get("ok", {})

    async def ask(self, request: dict[str, Json], timeout_s: float) -> Json:
        """Returns the answer to one request: `ok` or `error`. Raises ExecutorFailedError."""
        if self._process is None or self._process.stdin is None or self._reading is None or self._reading.done():
            raise ExecutorFailedError(f"the executor has ended: {self._why}\n{tail(self._log)}")
        self._count += 1
        number = self._count
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._process.stdin.write(json.dumps({"id": number, **request}).encode() + b"\n")
            await self._process.stdin.drain()
            return await asyncio.wait_for(answered, timeout_s)
        except TimeoutError:
            raise ExecutorFailedError(f"no answer within {timeout_s:g} s\n{tail(self._log)}") from None
        except OSError as error:
            raise ExecutorFailedError(f"the executor has ended: {error}\n{tail(self._log)}") from error
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> int:
        """Ends the executor by ending its input, and returns its exit status."""
        if self._process is None:
            return 0
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), END_S)
        except TimeoutError:
            await stop(self._process)
        if self._reading is not None:
            self._reading.cancel()
            with suppress(asyncio.CancelledError):
                await self._reading
        return self._process.returncode or 0

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._why = "its output ended"
        while line := await self._process.stdout.readline():
            try:
                answer = json.loads(line)
                answered = self._waiting.get(answer["id"])
            except (ValueError, KeyError, TypeError):
                self._why = f"it wrote what is no answer: {line[:200]!r}"
                break
            if answered is not None and not answered.done():
                answered.set_result(answer)
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_exception(ExecutorFailedError(f"the executor has ended: {self._why}\n{tail(self._log)}"))
