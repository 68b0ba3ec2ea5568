"""The processes of a run: etcd, `kvgrpc fleet`, other readers of its engines, and those that play the engines."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.fleet.child import ChildProcess
from bench.fleet.engines import PresentLives, SimulatedEngine
from tests.registry.etcds import RunningEtcd
from tests.service.engines import wait_until

READY_S = 60.0
DOOMED_SHARE = 20
"""Number of engines, of which one is published by a process that will be killed, and another one answered by one."""


@dataclass(frozen=True)
class FleetSite:
    """All processes of a run. Nothing is published yet."""

    etcd: RunningEtcd
    fleet_pid: int
    fleet_address: str
    unchecked: ChildProcess
    router: ChildProcess
    publishers: tuple[ChildProcess, ...]
    """The last one is killed."""
    answerers: tuple[ChildProcess, ...]
    """The first one is killed."""
    engines: tuple[SimulatedEngine, ...]
    doomed: int
    """Number of engines at each end of the list that a kill concerns: the first are answered by a process of their own,
    the last are published by one.
    """

    @property
    def readers(self) -> dict[str, int]:
        """The process of each reader, by the reader's name in the result."""
        return {"with_checks": self.fleet_pid, "without_checks": self.unchecked.pid, "router": self.router.pid}


@contextmanager
def fleet_site(folder: Path, count: int, ttl_s: int, publishers: int) -> Iterator[FleetSite]:
    """Runs everything, with the data in a folder."""
    doomed = max(1, count // DOOMED_SHARE)
    lives = PresentLives.new(folder / "lives", count)
    with ExitStack() as ends:

        def child(module: str, **job: Any) -> ChildProcess:
            made = ChildProcess(module, job | {"lives": str(lives.path)})
            ends.callback(made.close)
            return made

        etcd = RunningEtcd(folder / "etcd", ("--unsafe-no-fsync=false",))
        ends.callback(etcd.end)
        etcd.start()
        parts = ((0, doomed), (doomed, count - doomed))
        answerers = tuple(child("answers", first=first, count=many) for first, many in parts)
        ports = [port for answerer in answerers for port in answerer.said["ports"]]
        engines = tuple(SimulatedEngine(number, f"127.0.0.1:{port}") for number, port in enumerate(ports))
        staying = engines[: count - doomed]
        groups = [staying[place::publishers] for place in range(publishers)] + [engines[count - doomed :]]
        registry = f"etcd://{etcd.address}"
        pid, address = ends.enter_context(fleet_server(folder, registry))
        yield FleetSite(
            etcd, pid, address, child("unchecked", registry=registry), child("router", address=address),
            tuple(
                child("publications", etcd=etcd.address, ttl_s=ttl_s, engines=[one.to_json() for one in group])
                for group in groups if group
            ),
            answerers, engines, doomed,
        )  # fmt: skip


@contextmanager
def fleet_server(folder: Path, registry: str, name: str = "fleet") -> Iterator[tuple[int, str]]:
    """Runs `kvgrpc fleet`, and gives its process and address."""
    ready, log = folder / f"{name}.json", folder / f"{name}.log"
    command = [sys.executable, "-m", "kvgrpc", "fleet", "--listen", "127.0.0.1:0", "--registry", registry]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("KVGRPC_", "OTEL_"))}
    with log.open("wb") as out:
        process = subprocess.Popen([*command, "--ready-file", str(ready)], stdout=out, stderr=out, env=environment)
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None, READY_S, lambda: "kvgrpc fleet starts")
        if not ready.exists():
            raise RuntimeError(f"kvgrpc fleet did not start:\n{log.read_text(errors='replace')}")
        yield process.pid, json.loads(ready.read_text())["address"]
    finally:
        process.kill()
        process.wait()
