"""A real Prometheus that scrapes leads, and promtool."""

import json
import math
import ssl
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.operators.programs import Programs, free_ports, running
from tests.service.engines import wait_until

TLS_JOB = """  - job_name: kvgrpc-{name}
    scheme: https
    tls_config: {{ca_file: "{ca}", server_name: localhost}}
    static_configs:
"""
CONFIG = """global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: kvgrpc
    static_configs:
"""


@dataclass(frozen=True)
class Target:
    """A lead to scrape. `ca`: the CA of its certificate, for HTTPS."""

    name: str
    address: str
    ca: Path | None = None

    @property
    def row(self) -> str:
        """Its row of a configuration; `instance` is the lead's name."""
        return f'      - {{targets: ["{self.address}"], labels: {{instance: "{self.name}"}}}}\n'


class Prometheus:
    """A Prometheus that runs."""

    def __init__(self, address: str, targets: Sequence[Target]) -> None:
        self.address = address
        self._names = {target.name for target in targets}

    def ask(self, path: str, **query: str | float) -> Any:
        """Returns the data of an answer of the HTTP API. Fails for an error."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=20) as reply:
            return json.load(reply)["data"]

    def series(self, query: str) -> list[dict[str, Any]]:
        """Returns the series of a query that have a number now."""
        found: list[dict[str, Any]] = self.ask("query", query=query)["result"]
        return [row for row in found if not math.isnan(float(row["value"][1]))]

    def exemplars(self, query: str) -> set[str]:
        """Returns the trace ids of the exemplars of the last ten minutes."""
        now = time.time()
        rows = self.ask("query_exemplars", query=query, start=now - 600, end=now)
        return {one["labels"]["trace_id"] for row in rows for one in row["exemplars"]}

    def alerts(self) -> list[str]:
        """Returns the names of all alerts that it evaluates."""
        return [rule["name"] for group in self.ask("rules")["groups"] for rule in group["rules"]]

    def fired(self) -> set[tuple[str, str]]:
        """Returns (alert, lead) of all that have fired since its start."""
        rows = self.series('max_over_time(ALERTS{alertstate="firing"}[1h])')
        return {(row["metric"]["alertname"], row["metric"]["instance"]) for row in rows}

    def unreached(self) -> dict[str, str]:
        """Returns why it does not reach a lead, by lead."""
        rows = {row["labels"]["instance"]: row for row in self.ask("targets", state="active")["activeTargets"]}
        found = {name: row["lastError"] for name, row in rows.items() if row["health"] != "up"}
        return found | dict.fromkeys(self._names - rows.keys(), "not tried yet")

    def _answers(self) -> bool:
        try:
            self.ask("query", query="1")
        except OSError:
            return False
        return True


@contextmanager
def scraping(
    programs: Programs, folder: Path, targets: Sequence[Target], rules: str = "groups: []\n"
) -> Iterator[Prometheus]:
    """Runs a Prometheus that scrapes the targets each second, and evaluates the rules as often."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rules.yaml").write_text(rules)
    config = CONFIG.format(rules=folder / "rules.yaml")
    config += "".join(target.row for target in targets if target.ca is None)
    for target in targets:
        if target.ca is not None:
            config += TLS_JOB.format(name=target.name, ca=target.ca) + target.row
    (folder / "prometheus.yml").write_text(config)
    (port,) = free_ports(1)
    command = [
        str(programs.need("prometheus")), f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
    ]  # fmt: skip
    made, log = Prometheus(f"127.0.0.1:{port}", targets), folder / "log"
    with running(command, log):
        wait_until(made._answers, what=log.read_text)
        yield made


def promtool(programs: Programs, *arguments: str, text: str = "") -> str:
    """Runs promtool. Returns what it complains about; empty: nothing."""
    command = [str(programs.need("promtool")), *arguments]
    ended = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=120)
    said = ended.stderr if arguments[:2] == ("check", "metrics") else ended.stdout + ended.stderr
    return said if ended.returncode or (said and arguments[:2] == ("check", "metrics")) else ""


def page(target: Target) -> str:
    """Returns the metrics of a lead as text of Prometheus."""
    context = None if target.ca is None else ssl.create_default_context(cafile=str(target.ca))
    scheme = "http" if target.ca is None else "https"
    host = target.address if target.ca is None else f"localhost:{target.address.rpartition(':')[2]}"
    with urllib.request.urlopen(f"{scheme}://{host}/metrics", timeout=20, context=context) as reply:
        return str(reply.read().decode())
