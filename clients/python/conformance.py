"""Runs the executor of the Python client: it reads requests from standard input, one JSON object a line, and answers
each.

    python -m clients.python.conformance

clients/conformance/README.md describes each op. The executor judges nothing: it passes on what the client answers.
Every request runs in its own task, so a call that waits delays no other.
"""

import asyncio
import json
import sys
from typing import Any

from clients.python.conformance_ops import Ops, error_of
from kvgrpc.errors import KVGrpcError

LINE_BYTES_MAX = 64 << 20


async def main() -> None:
    """Serves until its input ends."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(LINE_BYTES_MAX)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    ops, tasks = Ops(), set[asyncio.Task[None]]()
    while line := await reader.readline():
        task = asyncio.create_task(answer(ops, json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await ops.close_all()


async def answer(ops: Ops, request: dict[str, Any]) -> None:
    """Carries out one request and writes its answer."""
    try:
        outcome = {"ok": await ops.perform(request)}
    except KVGrpcError as error:
        outcome = {"error": error_of(error)}
    except Exception as error:  # noqa: BLE001 - whatever it is, the runner is to see it
        outcome = {"error": {"code": "EXECUTOR", "message": f"{type(error).__name__}: {error}"}}
    sys.stdout.write(json.dumps({"id": request["id"], **outcome}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main())
