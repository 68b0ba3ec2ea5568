"""docs/metrics.md has the table of metrics that the code makes, and its queries name only what there is."""

import re

from kvgrpc.service.metrics.endpoint import ANSWER_S, CONNECTIONS_MAX
from kvgrpc.service.metrics.families import FAMILIES, Family, MetricKind
from tests.docs.operating.series import SERIES
from tests.docs.pages import DOCS, section

PAGE = DOCS / "metrics.md"


def shown_name(family: Family) -> str:
    """Returns the name as queries have it."""
    return f"{family.name}_total" if family.kind is MetricKind.COUNTER else family.name


def table() -> list[str]:
    """Returns the table of metrics as lines of the page."""
    lines = ["| Metric | Kind | Labels | Meaning |", "|---|---|---|---|"]
    for family in FAMILIES:
        labels = ", ".join(f"`{label}`" for label in family.labels) or "none"
        lines.append(f"| `{shown_name(family)}` | {family.kind.value} | {labels} | {family.meaning} |")
    return lines


def test_the_page_has_the_table_that_the_code_makes() -> None:
    """`python -c 'from tests.docs.operating.test_metrics import table; print("\\n".join(table()))'` makes it."""
    lines = PAGE.read_text().splitlines()
    begins = lines.index(table()[0])
    assert lines[begins : begins + len(table())] == table()
    assert not lines[begins + len(table())]


def test_the_page_and_its_queries_name_only_metrics_that_there_are() -> None:
    known = SERIES | {shown_name(family) for family in FAMILIES}
    assert set(re.findall(r"(?<![:\w])kvgrpc_\w+", PAGE.read_text())) <= known


def test_the_page_states_the_bounds_of_the_code() -> None:
    text = PAGE.read_text()
    assert f"else 503 after {ANSWER_S:g} s" in text
    assert f"At most {CONNECTIONS_MAX} connections" in text
    assert "/readyz" in section(PAGE, "## Scraping")
