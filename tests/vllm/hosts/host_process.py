"""vLLM engines as processes on hosts of a test: `engine_process`, with one more field of each request.

The "host" of a request has the name of a network namespace, and a folder. The process gets what another host would not
share: the network of that name, a host name, shared memory, and files of temporary folders. A node of an engine whose
"node_rank" is not 0 has workers alone; its lines are not read.
"""

import asyncio
import ctypes
import getpass
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from tests.vllm.engine_process import fork_on_request, serve

NAMESPACES = Path("/run/netns")
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x40000000
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


def become_node(request: dict[str, Any], lines_socket: socket.socket) -> None:
    """Runs an engine, or the workers of one, until the process ends."""
    enter(**request["host"])
    arguments = request["arguments"]
    if not arguments.get("node_rank"):
        asyncio.run(serve(arguments, lines_socket))
        return
    config = AsyncEngineArgs(**arguments).create_engine_config(headless=True)
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)


def enter(name: str, folder: str) -> None:
    """Moves this process, and all that it starts, to a host."""
    with (NAMESPACES / name).open() as network:
        _done(_libc.setns(network.fileno(), _CLONE_NEWNET))
    _done(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC))
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    for own in ("/dev/shm", folder):
        _mount("tmpfs", own, "tmpfs", 0)
    socket.sethostname(name)
    # What torch compiles lies outside: a first token would wait for minutes.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    words = [word if word is None else word.encode() for word in (source, target, kind)]
    _done(_libc.mount(*words, ctypes.c_ulong(flags), None))


def _done(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    fork_on_request(become_node)
