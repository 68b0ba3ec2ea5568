"""Every query of the dashboard returns a series on a real Prometheus, while three leads move KV."""

import asyncio
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from tests.operators.load import Leads, leads, loaded
from tests.operators.programs import Programs
from tests.operators.prometheus import Prometheus, page, promtool, scraping
from tests.service.engines import wait_until

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy/grafana/kvgrpc.json"
RULES = ROOT / "deploy/prometheus"
WITHIN_S = 90.0
"""Time until every panel has data, in seconds: far above what two scrapes of each series take."""
EXEMPLARS = "kvgrpc_transfer_duration_seconds_bucket"


@dataclass
class PanelsFound:
    """What the dashboard shows, and what promtool says."""

    panels: list[str]
    empty: dict[str, str] = field(default_factory=dict)
    """Queries without a series, by panel."""
    complaints: dict[str, str] = field(default_factory=dict)
    exemplars: int = 0


def queries() -> list[tuple[str, str]]:
    """Returns (title of a panel, query with what Grafana puts in) for each query."""
    return [
        (panel["title"], with_variables(target["expr"]))
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel.get("targets", [])
    ]


def with_variables(query: str) -> str:
    """Returns a query with all leads, and with a range that two scrapes fill."""
    made = query.replace("$__rate_interval", "15s").replace("$instance", ".*")
    assert not re.search(r"\$\w", made), f"a variable that this program does not know: {made}"
    return made


async def check(programs: Programs, folder: Path) -> PanelsFound:
    """Runs leads, a load and a Prometheus until every panel has data."""
    found = PanelsFound(sorted({title for title, _ in queries()}))
    for what, arguments in {
        "check rules": ("check", "rules", str(RULES / "rules.yaml")),
        "test rules": ("test", "rules", str(RULES / "rules_test.yaml")),
    }.items():
        if said := promtool(programs, *arguments):
            found.complaints[what] = said
    with leads(folder) as all_leads, scraping(programs, folder / "prometheus", all_leads.targets) as prometheus:
        async with loaded(all_leads) as traces:
            await asyncio.to_thread(_watch, found, prometheus, traces)
            await asyncio.to_thread(_check_pages, programs, all_leads, found)
    return found


def _watch(found: PanelsFound, prometheus: Prometheus, traces: set[str]) -> None:
    missing = queries()

    def all_shown() -> bool:
        missing[:] = [(title, query) for title, query in missing if not prometheus.series(query)]
        return not missing and not prometheus.unreached()

    try:
        wait_until(all_shown, WITHIN_S)
    except AssertionError:
        found.empty = dict(missing)
    found.exemplars = len(prometheus.exemplars(EXEMPLARS) & traces)


def _check_pages(programs: Programs, all_leads: Leads, found: PanelsFound) -> None:
    for target in all_leads.targets:
        if said := promtool(programs, "check", "metrics", text=page(target)):
            found.complaints[f"check metrics of {target.name}"] = said
