"""Runs vLLM's HTTP servers as processes, forked from one that has imported vLLM: see tests/vllm/engine_process.py.

A request has the server's arguments in place of an engine's. SIGTERM ends a server; nothing comes over its socket.
"""

import socket
import sys
from typing import Any

from vllm.entrypoints.launchers.api_server.entry import main

from tests.vllm.engine_process import fork_on_request


def become_server(request: dict[str, Any], _: socket.socket) -> None:
    """Runs vLLM's server in the forked process, until its end."""
    sys.argv = ["vllm", *request["arguments"]]
    main()


if __name__ == "__main__":
    fork_on_request(become_server)
