"""Every alert has a section in docs/runbook.md and a test of its rule, and names only metrics that there are. The
dashboard is what its script writes.
"""

import json
import re

from kvgrpc.cli.app import app
from scripts import dashboard
from tests.docs.operating.series import SERIES
from tests.docs.pages import DOCS, ROOT

DEPLOY = ROOT / "deploy"
RULES = (DEPLOY / "prometheus/rules.yaml").read_text()
ALERTS = re.findall(r"alert: (\w+)", RULES)


def test_every_alert_has_a_section_of_the_runbook_and_names_it() -> None:
    sections = re.findall(r"^## (\w+)$", (DOCS / "runbook.md").read_text(), re.MULTILINE)
    assert [name for name in sections if name.startswith("Kvgrpc")] == ALERTS
    assert re.findall(r"docs/runbook.md#(\w+)", RULES) == [name.lower() for name in ALERTS]


def test_what_the_runbook_has_done_is_a_command_that_exists() -> None:
    text = (DOCS / "runbook.md").read_text()
    commands = {info.callback.__name__.replace("_", "-") for info in app.registered_commands if info.callback}
    named = set(re.findall(r"`kvgrpc\s+([a-z][a-z-]*)", text))
    assert "release-quarantine" in named
    assert named <= commands
    assert re.findall(r"\b(?:Cancel|Release|StartDrain|List|Get)[A-Z]\w*", text) == [], "an RPC, where a command is"


def test_every_alert_has_a_test_of_its_rule() -> None:
    tested = re.findall(r"alertname: (\w+)\n", (DEPLOY / "prometheus/rules_test.yaml").read_text())
    assert set(tested) == set(ALERTS)


def test_alerts_and_graphs_name_only_metrics_that_there_are() -> None:
    queries = [target["expr"] for panel in dashboard.dashboard()["panels"] for target in panel.get("targets", ())]
    named = {name for query in queries for name in re.findall(r"(?:kvgrpc|rpc_server)_\w+", query)}
    assert named <= SERIES
    expressions = re.findall(r"expr: (?:\|\n)?(.*?)\n        (?:for|labels)", RULES, re.DOTALL)
    assert len(expressions) == len(ALERTS)
    assert {name for text in expressions for name in re.findall(r"kvgrpc_\w+", text)} <= SERIES


def test_the_dashboard_is_what_its_script_writes() -> None:
    """`python -m scripts.dashboard` writes it."""
    assert json.loads(dashboard.FILE.read_text()) == dashboard.dashboard()
