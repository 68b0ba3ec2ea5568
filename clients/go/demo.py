#!/usr/bin/env python3
"""Starts two servers and lets the Go sample drive a pull between them: `make demo-go`.

    clients/go/demo.py [flags of the sample]

Needs the `kvgrpc` command beside the Python that runs it, and Go; where Go is missing it says so and does nothing.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).resolve().parent
KVGRPC = Path(sys.executable).with_name("kvgrpc")
READY_S = 60


def main() -> int:
    """Returns the exit status of the sample."""
    go = shutil.which("go")
    if go is None:
        sys.stdout.write("demo-go: SKIP: go is not on the PATH\n")
        return 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        binary = folder / "demo"
        build = [go, "build", "-o", binary, "./samples/demo"]
        subprocess.run(build, cwd=HERE, check=True)
        ready = [folder / name for name in ("prefill", "decode")]
        servers = [start(stack, path) for path in ready]
        prefill, decode = (address(path, server) for path, server in zip(ready, servers, strict=True))
        command = [binary, "-prefill", prefill, "-decode", decode, *sys.argv[1:]]
        return subprocess.run(command, check=False).returncode


def start(stack: ExitStack, ready: Path) -> "subprocess.Popen[bytes]":
    """Starts a server with its own pool; leaving `stack` stops it."""
    command = [
        KVGRPC,
        "serve",
        "--port",
        "0",
        "--engine-id",
        ready.name,
        "--ready-file",
        ready,
        "--weights-revision",
        "demo",
    ]
    server = subprocess.Popen([*command, "--log-level", "warning"])
    stack.callback(server.wait)
    stack.callback(server.terminate)
    return server


def address(ready: Path, server: "subprocess.Popen[bytes]") -> str:
    """Returns the address that a server listens at, once it does."""
    until = time.monotonic() + READY_S
    while not ready.exists():
        if server.poll() is not None or time.monotonic() > until:
            sys.exit(f"demo-go: the server {ready.name} does not start")
        time.sleep(0.05)
    found: str = json.loads(ready.read_text())["address"]
    return found


if __name__ == "__main__":
    sys.exit(main())
