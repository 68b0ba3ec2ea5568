"""Processes of the demo: servers and engines, started together and ended in any case."""

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvgrpc.errors import InternalError, Reason

START_TIMEOUT_S = 60.0
"""Importing torch on a busy machine takes seconds."""
REPLY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
ROOT = Path(__file__).resolve().parents[2]
"""The checkout: the engines are in its examples folder."""


class DemoFailed(InternalError):
    """A process of the demo did not do its part."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.INTERNAL, message)


@asynccontextmanager
async def server(folder: Path, name: str, data_path: str, environment: dict[str, str]) -> AsyncIterator[str]:
    """A `kvgrpc serve` that waits for its engine at `folder/name.sock`; gives its address."""
    ready = folder / f"{name}.json"
    paths = ["--data-paths", data_path] if data_path != "auto" else []
    process = await _start(
        ["-m", "kvgrpc", "serve", "--port", "0", "--no-pool", "--engine-id", name, "--ready-file", str(ready),
         "--session-socket", str(folder / f"{name}.sock"), "--log-level", "warning", "--drain-s", "2", *paths],
        environment | {"OTEL_SERVICE_NAME": name},
    )  # fmt: skip
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            assert process.stdout is not None
            if not await process.stdout.readline():
                raise DemoFailed(f"server {name} did not start")
        yield str(json.loads(await asyncio.to_thread(ready.read_text))["address"])
    finally:
        await _stop(process)


class EngineProcess:
    """An engine of the demo, asked by JSON lines."""

    def __init__(self, name: str, process: Process) -> None:
        self._name = name
        self._process = process
        self._turn = asyncio.Lock()

    async def ask(self, **request: Any) -> dict[str, Any]:
        """One request and its reply; `error` in it is the engine's, not ours."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        async with self._turn, asyncio.timeout(REPLY_TIMEOUT_S):
            stdin.write(json.dumps(request).encode() + b"\n")
            await stdin.drain()
            return await self.reply()

    async def reply(self) -> dict[str, Any]:
        """The next line of the engine."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise DemoFailed(f"engine {self._name} ended with exit code {await self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found


@asynccontextmanager
async def engine(name: str, socket: Path | None) -> AsyncIterator[EngineProcess]:
    """An engine process, attached at `socket`, or alone."""
    if not (ROOT / "examples" / "minimal_engine").is_dir():
        raise DemoFailed(f"the demo runs in a checkout of the repository; there is no examples folder in {ROOT}")
    attach = ["--session-socket", str(socket)] if socket else []
    process = await _start(["-m", "examples.minimal_engine", *attach], {}, stdin=PIPE)
    try:
        started = EngineProcess(name, process)
        async with asyncio.timeout(START_TIMEOUT_S):
            await started.reply()
        yield started
    finally:
        await _stop(process)


async def _start(arguments: list[str], environment: dict[str, str], stdin: int | None = None) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdin=stdin, stdout=PIPE, cwd=ROOT, env=os.environ | environment
    )


async def _stop(process: Process) -> None:
    """Asks a process to end: by the end of its input if it reads, else by SIGTERM; then makes it."""
    if process.returncode is None:
        if process.stdin is not None:
            process.stdin.close()
        else:
            process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
