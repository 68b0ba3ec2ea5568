"""The program of a run's child processes: `python -m bench.roles.program ROLE FD`.

It performs the commands that come over descriptor FD, one at a time, and ends when FD is closed. A command names a
public method of the role's class, and its arguments are those of the method.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from typing import Any

from bench.roles.role import Role
from bench.stages.hosts import MESSAGE_BYTES_MAX
from kvgrpc.errors import KVGrpcError
from kvgrpc.service.polling import poll_in_place

_log = logging.getLogger(__name__)


async def serve(role: Role, control: socket.socket) -> None:
    """Performs commands until the driver is gone."""
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
        except Exception as error:  # noqa: BLE001 - the driver reports the error
            _log.exception("%s failed", message["command"])
            answer = {"error": f"{type(error).__name__}: {error}"}
        try:
            socket.send_fds(control, [json.dumps(answer).encode()], send)
        except BrokenPipeError:
            break
    await role.close()


def make_role(name: str) -> Role:
    """Returns the role of that name."""
    if name == "server":
        poll_in_place(os.environ)
        from bench.roles.server_role import ServerRole

        return ServerRole()
    if name == "store":
        from bench.roles.store_role import StoreRole

        return StoreRole()
    if name == "collector":
        from bench.roles.collector import Collector

        return Collector()
    from bench.roles.baseline import Baseline

    return Baseline()


def main() -> None:
    """Runs until the driver closes its end."""
    # A terminal sends ^C to all its processes. Child processes end when their driver does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("nixl").setLevel(logging.ERROR)
    with socket.socket(fileno=int(sys.argv[2])) as control:
        asyncio.run(serve(make_role(sys.argv[1]), control))
    sys.stderr.flush()
    os._exit(0)  # threads that libraries leave running must not keep the run waiting


if __name__ == "__main__":
    main()
