"""Real members of etcd on loopback, which may be killed, stopped and started again."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvgrpc.tls import TlsFiles

MISSING = "" if shutil.which("etcd") else "etcd is not installed: apt-get install etcd-server"
needs_etcd = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


class RunningEtcd:
    """One member, with its data in a folder. `tls` asks every client for a certificate of its CA.

    `within` is a command that starts it elsewhere, where it has the address `home`.
    """

    def __init__(
        self,
        folder: Path,
        options: Sequence[str] = (),
        tls: TlsFiles | None = None,
        *,
        within: Sequence[str] = (),
        home: str = "127.0.0.1",
    ) -> None:
        self._folder = folder
        self._options = options
        self._tls = tls
        self.name = folder.name
        self._within = within
        self.address = f"{home}:{free_port()}"
        self.peer = f"http://127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, members: str = "") -> None:
        own = f"{'http' if self._tls is None else 'https'}://{self.address}"
        files = self._tls
        tls = [] if files is None else [
            "--client-cert-auth", f"--trusted-ca-file={files.ca}",
            f"--cert-file={files.cert}", f"--key-file={files.key}",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [
                *self._within, "etcd", "--name", self.name, "--data-dir", str(self._folder),
                "--listen-client-urls", own, "--advertise-client-urls", own,
                "--listen-peer-urls", self.peer, "--initial-advertise-peer-urls", self.peer,
                "--initial-cluster", members or f"{self.name}={self.peer}", "--unsafe-no-fsync",
                *self._options, *tls,
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
            self._process.wait(10)

    def ctl(self, *arguments: str, files: TlsFiles | None = None) -> str:
        """Runs etcdctl, which shows the certificate of `files`."""
        tls = [] if files is None else [f"--cert={files.cert}", f"--key={files.key}", f"--cacert={files.ca}"]
        done = subprocess.run(
            ["etcdctl", "--endpoints", self.address, *tls, *arguments],
            env={**os.environ, "ETCDCTL_API": "3"}, check=True, capture_output=True, text=True, timeout=20,
        )  # fmt: skip
        return done.stdout

    def revision(self) -> int:
        """Returns the revision of the store."""
        return int(json.loads(self.ctl("get", "none", "-w", "json"))["header"]["revision"])


class EtcdCluster:
    """Three members."""

    def __init__(self, folder: Path) -> None:
        # A member that is stopped is missed soon: another is elected within half a second.
        quick = ("--heartbeat-interval", "50", "--election-timeout", "500")
        self.members = [RunningEtcd(folder / f"m{n}", quick) for n in range(3)]

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(member.address for member in self.members)

    def start(self) -> None:
        for member in self.members:
            member.start(",".join(f"{one.name}={one.peer}" for one in self.members))

    def leader(self) -> RunningEtcd:
        """Returns the member that leads, as the others say."""
        for member in self.members:
            with contextlib.suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
                status = json.loads(member.ctl("endpoint", "status", "-w", "json"))[0]["Status"]
                if status["leader"] == status["header"]["member_id"]:
                    return member
        raise LookupError("no member leads")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[RunningEtcd]:
    made = RunningEtcd(tmp_path / "etcd")
    made.start()
    try:
        yield made
    finally:
        made.end()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    made = EtcdCluster(tmp_path)
    made.start()
    try:
        yield made
    finally:
        for member in made.members:
            member.end()
