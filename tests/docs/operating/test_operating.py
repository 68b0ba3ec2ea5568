"""docs/operating.md names all alerts, and only settings and values that there are."""

import re

from kvgrpc.config import Config
from kvgrpc.core.values.limits import Limits
from tests.docs.pages import DOCS, ROOT, plain, section, tables
from tests.operators.rules import FILE, names

PAGE = DOCS / "operating.md"
TEXT = PAGE.read_text()
VALUES = (ROOT / "deploy/helm/kvgrpc/values.yaml").read_text()


def test_the_table_of_alerts_is_that_of_the_rules() -> None:
    (rows,) = tables(section(PAGE, "## Alerts"))
    rules = FILE.read_text()
    alerts = zip(names(rules), re.findall(r"severity: (\w+)", rules), strict=True)
    assert [(re.findall(r"\[(\w+)\]", row[0])[0], row[1]) for row in rows] == list(alerts)


def test_values_that_the_page_names_are_those_of_the_chart() -> None:
    known = paths()
    sections = "|".join(sorted({name.partition(".")[0] for name in known} - {"tls"}))  # a setting is tls.dir
    named = set(re.findall(rf"`((?:{sections})\.\w+)`", TEXT)) | set(re.findall(r"--set '?([\w.]+)=", TEXT))
    assert len(named) > 8
    assert sorted(named - known) == []


def paths() -> set[str]:
    """Returns the paths of all keys of the chart's values, which are indented by two spaces each."""
    found: set[str] = set()
    above: list[str] = []
    for indent, key in re.findall(r"^( *)(\w+):", VALUES, re.MULTILINE):
        above = [*above[: len(indent) // 2], key]
        found.add(".".join(above))
    return found


def test_settings_that_matter_are_settings() -> None:
    (rows,) = tables(section(PAGE, "## Settings that matter"))
    named = {plain(name).partition(".")[0] for row in rows for name in re.findall(r"`[\w.]+`", row[0])}
    assert named - {"on_loss"} <= set(Config.__dataclass_fields__)
    assert set(re.findall(r"`limits\.(\w+)`", TEXT)) <= set(Limits.__dataclass_fields__)


def test_ports_of_the_page_are_those_of_the_chart() -> None:
    ports = re.findall(r"^(\d+)", "\n".join(row[0] for row in tables(section(PAGE, "## Kubernetes"))[0]), re.MULTILINE)
    assert ports == [re.findall(rf"{name}: (\d+)", VALUES)[0] for name in ("http", "grpc", "fleet", "metrics", "first")]
