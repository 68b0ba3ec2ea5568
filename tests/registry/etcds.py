"""A real etcd on loopback, which may be killed, stopped and started again."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

MISSING = "" if shutil.which("etcd") else "etcd is not installed: apt-get install etcd-server"
needs_etcd = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


class RunningEtcd:
    """One member, with its data in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self._peer = f"http://127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        own = f"http://{self.address}"
        self._process = subprocess.Popen(
            [
                "etcd", "--name", "t", "--data-dir", str(self._folder), "--listen-client-urls", own,
                "--advertise-client-urls", own, "--listen-peer-urls", self._peer, "--initial-advertise-peer-urls",
                self._peer, "--initial-cluster", f"t={self._peer}", "--unsafe-no-fsync",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def end(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
            self._process.wait(10)

    def ctl(self, *arguments: str) -> str:
        """Runs etcdctl."""
        done = subprocess.run(
            ["etcdctl", "--endpoints", self.address, *arguments],
            env={**os.environ, "ETCDCTL_API": "3"}, check=True, capture_output=True, text=True, timeout=20,
        )  # fmt: skip
        return done.stdout


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[RunningEtcd]:
    made = RunningEtcd(tmp_path / "etcd")
    made.start()
    try:
        yield made
    finally:
        made.end()
