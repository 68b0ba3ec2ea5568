"""The processes of a run: leads, and the load generator."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from bench.overload.kinds import Kind
from examples.certs import Authority, named
from tests.service.engines import wait_until

BLOCKS = 256
READY_S = 60.0
GREEDY, OTHER = "greedy", "other"
POOL = ("--layers", "2", "--kv-heads", "2", "--head-dim", "64", "--blocks", str(BLOCKS), "--data-paths", "shm")
LEADS = ("source", "destination", "unrelated")
ROLES = "".join(
    f'[[callers]]\nname = "spiffe://bench/{name}"\nroles = [{roles}]\ntenant = "{tenant}"\n'
    for name, roles, tenant in (
        *((lead, '"engine", "peer"', "") for lead in LEADS),
        *((caller, '"router", "engine", "viewer"', f"{caller}-tenant") for caller in (GREEDY, OTHER)),
    )
)


@dataclass(frozen=True)
class LeadPlace:
    """A lead that runs."""

    address: str
    pid: int


@dataclass(frozen=True)
class Site:
    """All leads of a run, and the folder of the certificates; None without TLS."""

    source: LeadPlace
    destination: LeadPlace
    unrelated: LeadPlace
    tls: Path | None

    def credentials(self, caller: str) -> grpc.ChannelCredentials | None:
        """Returns the credentials of a caller; None without TLS."""
        if self.tls is None:
            return None
        folder = self.tls / caller
        parts = ((folder / name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt"))
        return grpc.ssl_channel_credentials(*parts)


@contextmanager
def site(*, tls: bool, flags: Sequence[str] = ()) -> Iterator[Site]:
    """Runs the leads."""
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="kvgrpc-overload-")))
        if tls:
            authority = Authority()
            for party in (*LEADS, GREEDY, OTHER):
                authority.issue(folder / party, [named(name) for name in ("localhost", f"spiffe://bench/{party}")])
            (folder / "roles.toml").write_text(ROLES)
        source, destination, unrelated = (
            ends.enter_context(_lead(name, folder, tls=tls, flags=flags)) for name in LEADS
        )
        yield Site(source, destination, unrelated, folder if tls else None)


@contextmanager
def _lead(name: str, folder: Path, *, tls: bool, flags: Sequence[str]) -> Iterator[LeadPlace]:
    ready = folder / f"{name}.json"
    host = "localhost" if tls else "127.0.0.1"
    command = [sys.executable, "-m", "kvgrpc", "serve", "--listen", f"{host}:0", "--drain-s", "0", *POOL, *flags]
    command += ["--ready-file", str(ready), "--engine-id", name]
    if tls:
        command += ["--tls-dir", str(folder / name), "--roles", str(folder / "roles.toml")]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("KVGRPC_", "OTEL_"))}
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None, READY_S, lambda: f"the lead {name} starts")
        if not ready.exists():
            raise RuntimeError(f"the lead {name} did not start:\n{log.read_text(errors='replace')}")
        yield LeadPlace(json.loads(ready.read_text())["address"], process.pid)
        if process.poll() is not None:
            raise RuntimeError(f"the lead {name} ended with {process.returncode}:\n{log.read_text(errors='replace')}")
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Generator:
    """A load generator that has its connections, and waits for its word."""

    def __init__(self, address: str, kinds: Sequence[Kind], tls: Path | None, **job: Any) -> None:
        """`job`: connections, seconds, and rate or in_flight."""
        whole = {"rate": 0.0, "in_flight": 0, "timeout_s": 20} | job
        whole |= {"address": address, "tls": str(tls / GREEDY) if tls else "", "authority": "localhost"}
        whole["kinds"] = [kind.to_json() for kind in kinds]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.overload.flood"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._say(json.dumps(whole))
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            self.close()
            raise RuntimeError("the load generator did not connect")

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def begin(self) -> None:
        self._say("go")

    @property
    def over(self) -> bool:
        """True once there is a result."""
        return self._process.poll() is not None

    def found(self) -> dict[str, Any]:
        """Waits for the end, and returns what became of the calls."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self.close()
        if not line:
            raise RuntimeError("the load generator ended without a result")
        return dict(json.loads(line))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
