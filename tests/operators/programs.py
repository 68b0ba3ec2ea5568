"""The programs that operators run, as processes: where they are, and how one is started on loopback and ended."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

TOOLS = Path(os.environ.get("OPERATOR_TOOLS") or ".tools/operators")
"""Folder of the programs, which `make operators-check` fills."""
APISERVER_VERSION = "v1.36.3"
APISERVER = Path(os.environ.get("APISERVER") or TOOLS / f"kube-apiserver@{APISERVER_VERSION}")
"""Path of the kube-apiserver, which `make apiserver` builds."""
END_S = 20.0


class Missing(Exception):
    """Raised when a program is not here. The text says which, and how to get it."""


@dataclass(frozen=True)
class Programs:
    """Paths of the programs."""

    prometheus: Path
    promtool: Path
    jaeger: Path
    helm: Path
    kubernetes: Path
    """A Python that has kubernetes-validate."""
    crds: Path
    """Folder of the definitions of custom resources."""
    apiserver: Path
    hadolint: Path
    systemd_analyze: Path
    """That of the system: its libraries are those of the system, too."""

    def need(self, name: str) -> Path:
        """Returns the path of a program. Raises Missing."""
        path: Path = getattr(self, name)
        if not path.exists():
            raise Missing(f"{name} is not at {path}: `make operators-check` fetches it where it can")
        return path


def found_in(tools: Path = TOOLS, jaeger: Path | None = None, apiserver: Path | None = None) -> Programs:
    """Returns the programs of a folder, which `make operators-check` fills. Two may be elsewhere."""
    return Programs(
        tools / "usr/bin/prometheus",
        tools / "usr/bin/promtool",
        jaeger or tools / "jaeger",
        tools / "helm",
        tools / "kubernetes/bin/python",
        tools / "crds",
        apiserver or tools / f"kube-apiserver@{APISERVER_VERSION}",
        tools / "hadolint",
        Path(shutil.which("systemd-analyze") or "/usr/bin/systemd-analyze"),
    )


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[None]:
    """Runs a program inside the context."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_ports(count: int) -> list[int]:
    """Returns different ports of loopback that are free now."""
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            one = stack.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            found.append(one.getsockname()[1])
        return found
