"""A real Jaeger: all in one process, with the traces that it received."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.operators.programs import Programs, free_ports, running
from tests.service.engines import wait_until


@dataclass(frozen=True)
class Span:
    """A span as Jaeger shows it. Times are in microseconds."""

    service: str
    instance: str
    name: str
    span_id: str
    parent_id: str
    start: int
    end: int
    failed: bool
    is_rpc: bool
    """True for a call that a client makes or a server serves."""


class Jaeger:
    """A Jaeger that runs. Leads export to `endpoint`."""

    def __init__(self, endpoint: str, query: str) -> None:
        self.endpoint, self._query = endpoint, query

    def trace(self, trace_id: str) -> list[Span]:
        """Returns the spans of a trace that have arrived."""
        try:
            with urllib.request.urlopen(f"{self._query}/api/traces/{trace_id}", timeout=20) as reply:
                (found,) = json.load(reply)["data"]
        except urllib.error.HTTPError:
            return []
        processes = found["processes"]
        return [_span(row, processes[row["processID"]]) for row in found["spans"]]

    def services(self) -> set[str]:
        """Returns the names of the services that it lists."""
        with urllib.request.urlopen(f"{self._query}/api/services", timeout=20) as reply:
            return set(json.load(reply)["data"] or ())

    def _answers(self) -> bool:
        try:
            self.services()
        except OSError:
            return False
        return True


def _span(row: Any, process: Any) -> Span:
    parents = [one["spanID"] for one in row["references"]]
    return Span(
        service=process["serviceName"],
        instance=_tags(process).get("service.instance.id", ""),
        name=row["operationName"],
        span_id=row["spanID"],
        parent_id=parents[0] if parents else "",
        start=row["startTime"],
        end=row["startTime"] + row["duration"],
        failed=_tags(row).get("error") is True,
        is_rpc=_tags(row).get("span.kind") in ("client", "server"),
    )


def _tags(row: Any) -> dict[str, Any]:
    return {one["key"]: one["value"] for one in row["tags"]}


@contextmanager
def collecting(programs: Programs, folder: Path) -> Iterator[Jaeger]:
    """Runs a Jaeger that keeps its traces in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = (
        "collector.otlp.grpc.host-port", "collector.otlp.http.host-port", "query.http-server.host-port",
        "query.grpc-server.host-port", "admin.http.host-port", "collector.grpc-server.host-port",
        "collector.http-server.host-port", "http-server.host-port", "processor.jaeger-compact.server-host-port",
        "processor.jaeger-binary.server-host-port", "processor.zipkin-compact.server-host-port",
    )  # fmt: skip
    ports = dict(zip(flags, free_ports(len(flags)), strict=True))
    command = [str(programs.need("jaeger")), *(f"--{flag}=127.0.0.1:{port}" for flag, port in ports.items())]
    made = Jaeger(f"http://127.0.0.1:{ports[flags[0]]}", f"http://127.0.0.1:{ports[flags[2]]}")
    log = folder / "log"
    with running(command, log):
        wait_until(made._answers, what=log.read_text)
        yield made
