"""The program of a run's child processes: `python -m kvgrpc.bench.host ROLE FD`.

It performs the commands that come over descriptor FD, one at a time, and ends when that is closed. What a role can do
are the methods of its class: a command names the method, its arguments are those of the method.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable
from typing import Any, Protocol

from kvgrpc.bench.hosts import MESSAGE_BYTES_MAX
from kvgrpc.errors import KVGrpcError

_log = logging.getLogger(__name__)

Answer = tuple[dict[str, Any], list[int]]
"""What a command gives: values for JSON, and descriptors that go with them."""


class Role(Protocol):
    """What this process is."""

    def perform(self, command: str, arguments: dict[str, Any], fds: list[int]) -> Awaitable[Answer]:
        """Performs one command; the descriptors are its to close."""
        ...

    async def close(self) -> None: ...


async def serve(role: Role, control: socket.socket) -> None:
    """Performs commands until there is nobody to send any."""
    while True:
        data, fds, _, _ = await asyncio.to_thread(socket.recv_fds, control, MESSAGE_BYTES_MAX, 4)
        if not data:
            break
        message = json.loads(data)
        send: list[int] = []
        try:
            result, send = await role.perform(message["command"], message["arguments"], fds)
            answer: dict[str, Any] = {"result": result}
        except KVGrpcError as error:
            answer = {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - the driver is who reports it
            _log.exception("%s failed", message["command"])
            answer = {"error": f"{type(error).__name__}: {error}"}
        socket.send_fds(control, [json.dumps(answer).encode()], send)
    await role.close()


def make_role(name: str) -> Role:
    """The role of that name."""
    if name == "server":
        from kvgrpc.bench.serving import Serving

        return Serving()
    from kvgrpc.bench.baseline import Baseline

    return Baseline()


def main() -> None:
    """Runs until the driver closes its end."""
    # A terminal sends ^C to all of its processes; ours end because their driver does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("nixl").setLevel(logging.ERROR)
    with socket.socket(fileno=int(sys.argv[2])) as control:
        asyncio.run(serve(make_role(sys.argv[1]), control))
    sys.stderr.flush()
    os._exit(0)  # what libraries leave running must not keep the run waiting


if __name__ == "__main__":
    main()
