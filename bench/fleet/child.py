"""A process of the benchmark that takes one line of JSON at a time, and answers each with one."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from kvgrpc import open_files

Answerer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class ChildProcess:
    """A module of this folder that runs as a process. `job` is its first line."""

    def __init__(self, module: str, job: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"bench.fleet.{module}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        self.said = self._ask(job)
        """Answer to the first line."""

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to one line."""
        return await asyncio.to_thread(self._ask, request)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(request)}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the benchmark ended with {self._process.wait()}")
        return dict(json.loads(line))

    def kill(self) -> None:
        """Ends the process as kill -9 does."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Ends the process, and forgets it."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def answer_lines(begin: Callable[[dict[str, Any]], Awaitable[tuple[dict[str, Any], Answerer]]]) -> None:
    """Answers the lines of standard input until it ends. `begin` takes the first, and says who answers the others."""

    async def all_lines() -> None:
        said, answer = await begin(json.loads(sys.stdin.readline()))
        print(json.dumps(said), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await answer(json.loads(line))), flush=True)

    open_files.raise_limit()
    asyncio.run(all_lines())


async def no_answer(_: dict[str, Any]) -> dict[str, Any]:
    """Answers with nothing: to have an answer is to live."""
    return {}


def processor_s(pid: int) -> float:
    """Returns the processor time of a process so far, in seconds."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total += int(path.read_text().split()[0])
        except OSError:
            continue  # a thread that has just ended
    return total / 1e9


def resident_bytes(pid: int) -> int:
    """Returns the memory of a process, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
