"""The router in Go as a process, with its engines and their leads."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.client import connect_sync
from tests.examples.http_engines import HttpEngine, serving, token, until
from tests.service.conftest import Start
from tests.service.engines import Engine

GO = shutil.which("go")
HERE = Path(__file__).resolve().parents[2] / "examples" / "router-go"
START_S = 60.0
KINDS = ("drive", "relay")
MODES = ("pull", "push")
SLOW = ("--bandwidth-limit-bytes-per-s", "2000")
"""Bandwidth at which a prompt takes seconds, so that there is time between prefill and decode."""
NEEDS_GO = [
    # A build from an empty cache takes a minute or two.
    pytest.mark.timeout(600),
    pytest.mark.skipif(GO is None, reason="go is not on the PATH"),
]
HELD = (
    "pending_transfer_count",
    "active_transfer_count",
    "lease_count",
    "open_access_count",
    "pinned_block_count",
    "quarantined_block_count",
)
"""Counts of a lead that are 0 at rest."""


@dataclass
class Router:
    """A router process, its engines in the order of their roles, and their leads by address."""

    url: str
    process: "subprocess.Popen[bytes]"
    prefills: list[HttpEngine]
    decodes: list[HttpEngine]
    leads: dict[str, Engine]

    def post(self, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
        return ask(self.url, "POST", "/v1/completions", body, **headers)

    def serves(self, seed: int, **headers: str) -> None:
        """Checks that a request gets the tokens of its prompt."""
        ids = prompt(seed)
        status, answer = self.post({"model": "none", "prompt": ids, "max_tokens": 3}, **headers)
        assert status == 200, answer
        assert answer["choices"][0]["token_ids"] == [token(ids, place) for place in range(3)]

    def hang_up(self, seed: int, when: Callable[[], object]) -> None:
        """Sends a request, and hangs up after `when` returns."""
        data = json.dumps({"model": "none", "prompt": prompt(seed), "max_tokens": 3}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", int(self.url.rpartition(":")[2]))) as client:
            client.sendall(head.encode() + data)
            when()

    def health(self) -> Any:
        status, found = ask(self.url, "GET", "/healthz")
        return found | {"status": status}

    def row(self, engine: HttpEngine) -> Any:
        """Returns the router's view of an engine."""
        (found,) = (row for row in self.health()["engines"] if row["lead"] == engine.lead)
        return found

    def kill(self, engine: HttpEngine) -> None:
        """Kills an engine's lead."""
        self.leads[engine.lead].process.kill()

    def at_rest(self, *gone: HttpEngine) -> None:
        """Waits until nothing is left at any lead that lives."""
        for engine in (*self.prefills, *self.decodes):
            if engine not in gone:
                until(lambda lead=engine.lead: held(lead) == {}, lambda lead=engine.lead: held(lead))  # type: ignore[misc]


def ask(url: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Makes one HTTP request. Returns the status and the JSON of its answer."""
    host, port = url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def held(lead: str) -> dict[str, Any]:
    """Returns the counts of what a lead still holds."""
    with connect_sync(lead) as client:
        counts, pool, pins = client.status().counts, client.pool_status().groups[0], client.pins().pins
    found: dict[str, Any] = {name: getattr(counts, name) for name in HELD if getattr(counts, name)}
    found |= {"allocated": pool.allocated_block_count} if pool.allocated_block_count else {}
    return found | ({"pins": str(pins)} if pins else {})


def moving(lead: str) -> bool:
    """Checks that bytes move to or from a lead's engine."""
    with connect_sync(lead) as client:
        return bool(client.status().counts.active_transfer_count)


def prompt(seed: int) -> list[int]:
    """Returns forty tokens: three blocks, of which the last is partial."""
    return [(seed * 131 + i * 7) % 1000 for i in range(40)]


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("go") / "router"
    subprocess.run([str(GO), "build", "-o", made, "."], cwd=HERE, check=True)
    return made


Begin = Callable[..., Router]


@pytest.fixture
def begin(binary: Path, start: Start, tmp_path: Path) -> Iterator[Begin]:
    """Yields a function that starts a router with one engine of each role, or as many as it is asked for."""
    with ExitStack() as stack:

        def make(
            kind: str, mode: str, prefills: int = 1, decodes: int = 1, slow: bool = False, **environment: str
        ) -> Router:
            flags = [("--engine-id", f"P{n}") for n in range(prefills)]
            flags += [("--engine-id", f"D{n}", *(SLOW if slow else ())) for n in range(decodes)]
            leads = start(*flags, **environment)
            engines = [stack.enter_context(serving(lead.address)) for lead in leads]
            command = [str(binary), "-listen", "127.0.0.1:0", "-mode", mode]
            for number, engine in enumerate(engines):
                role = "-prefill" if number < prefills else "-decode"
                command += [role, f"{kind},{engine.url},{engine.lead}"]
            process = stack.enter_context(running(command, tmp_path / "router.log", environment))
            url = listening(process, tmp_path / "router.log", "router: ")
            by_address = {lead.address: lead for lead in leads}
            router = Router(url, process, engines[:prefills], engines[prefills:], by_address)
            until(lambda: all(row["takes_work"] for row in router.health()["engines"]), router.health)
            return router

        yield make


@contextmanager
def running(command: list[str], log: Path, environment: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs a process that ends by SIGTERM, or is killed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=clean | environment)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(START_S)
        process.kill()
        process.wait()


def listening(process: "subprocess.Popen[bytes]", log: Path, says: str) -> str:
    """Returns the address at which a program listens, once it prints it."""

    def said() -> str:
        lines = [line for line in log.read_text().splitlines() if line.startswith(says)]
        return lines[0].split()[-1] if lines else ""

    until(lambda: bool(said()) or process.poll() is not None, log.read_text, START_S)
    assert process.poll() is None, log.read_text()
    return said()
