"""Runs the demo's processes, servers and engines: starts them, and ends them in any case."""

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

from kvgrpc.engine.session.exits import UNPREPARED, ended_with
from kvgrpc.errors import InternalError, Reason
from kvgrpc.tls import TlsFiles

START_TIMEOUT_S = 60.0
"""Maximum time for a process to start, in seconds. Importing torch on a busy machine takes seconds."""
REPLY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
ROOT = Path(__file__).resolve().parents[2]
"""Root of the clone: the engines are in its examples folder."""


class DemoFailed(InternalError):
    """Raised when a process of the demo fails to do its part."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.INTERNAL, message)


@asynccontextmanager
async def server(
    folder: Path, name: str, data_path: str, environment: dict[str, str], tls: TlsFiles | None = None
) -> AsyncIterator[str]:
    """Runs `kvgrpc serve`, which waits for its engine at `folder/name.sock`. Yields the server's address."""
    ready = folder / f"{name}.json"
    paths = ["--data-paths", data_path] if data_path != "auto" else []
    secured = [] if tls is None else ["--tls-dir", str(tls.cert.parent)]
    process = await _start(
        ["-m", "kvgrpc", "serve", *secured, "--port", "0", "--no-pool", "--engine-id", name, "--ready-file", str(ready),
         "--session-socket", str(folder / f"{name}.sock"), "--log-level", "warning", "--drain-s", "2", *paths],
        environment | {"OTEL_SERVICE_NAME": name},
    )  # fmt: skip
    async with _running(f"server {name}", process):
        async with asyncio.timeout(START_TIMEOUT_S):
            assert process.stdout is not None
            if not await process.stdout.readline():
                raise DemoFailed(f"server {name} did not start")
        yield str(json.loads(await asyncio.to_thread(ready.read_text))["address"])


class EngineProcess:
    """An engine of the demo that answers JSON lines."""

    def __init__(self, name: str, process: Process) -> None:
        self._name = name
        self._process = process
        self._turn = asyncio.Lock()

    async def ask(self, **request: Any) -> dict[str, Any]:
        """Sends one request and returns its reply. An `error` in the reply is the engine's, not raised here."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        async with self._turn, asyncio.timeout(REPLY_TIMEOUT_S):
            stdin.write(json.dumps(request).encode() + b"\n")
            with contextlib.suppress(ConnectionError):  # the engine has ended, and reply() raises
                await stdin.drain()
            return await self.reply()

    async def reply(self) -> dict[str, Any]:
        """Returns the engine's next line."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise DemoFailed(f"engine {self._name} does not answer")
        found: dict[str, Any] = json.loads(line)
        return found


@asynccontextmanager
async def engine(name: str, socket: Path | None) -> AsyncIterator[EngineProcess]:
    """Runs an engine process, attached at `socket`, or alone."""
    attach = ["--session-socket", str(socket)] if socket else []
    process = await _start(["-m", "examples.minimal_engine", *attach], {}, stdin=PIPE)
    async with _running(f"engine {name}", process):
        started = EngineProcess(name, process)
        async with asyncio.timeout(START_TIMEOUT_S):
            await started.reply()
        yield started


async def _start(arguments: list[str], environment: dict[str, str], stdin: int | None = None) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdin=stdin, stdout=PIPE, cwd=ROOT, env=os.environ | environment
    )


@asynccontextmanager
async def _running(name: str, process: Process) -> AsyncIterator[None]:
    """Ends the process in any case. Raises DemoFailed if it did not end in order, even if another error came first."""
    try:
        yield
    except Exception as error:
        if how := await _stop(process):
            raise DemoFailed(f"{name} {how}; {error}") from error
        raise
    except BaseException:
        if process.returncode is None:
            process.terminate()  # an engine that must stop does not have to read its input to the end
        await _stop(process)
        raise
    if how := await _stop(process):
        raise DemoFailed(f"{name} {how}")


async def _stop(process: Process) -> str:
    """Asks a process to end, by closing its input if it has one, else by SIGTERM; then kills it.

    Returns how the process ended, or "" if it ended in order.
    """
    asked = process.returncode is None
    if asked:
        if process.stdin is not None:
            process.stdin.close()
        else:
            process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            code = await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return f"was killed: it did not end in {STOP_TIMEOUT_S:g} s"
    in_order = code == 0 or (asked and code in UNPREPARED)
    return "" if in_order else f"ended with {ended_with(code)}"
