"""Each alert is fired once by a real fault on real leads, as a real Prometheus sees it."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.operators.faults import FAULTS, staged
from tests.operators.programs import Programs
from tests.operators.prometheus import scraping
from tests.operators.rules import FILE, names, shortened
from tests.service.engines import wait_until

ROUND_S = 1.5
"""Interval between two repetitions of a fault, in seconds: more than that between two scrapes."""
WITHIN_S = 150.0
"""Time until every alert has fired, in seconds: most take ten."""


@dataclass
class RulesFound:
    """The alerts, and those that did not fire, each with the reason."""

    rules: list[str]
    silent: dict[str, str] = field(default_factory=dict)


def check(programs: Programs, folder: Path) -> RulesFound:
    """Causes every fault until its alert fires."""
    found, text = RulesFound(names(FILE.read_text())), shortened(FILE.read_text())
    with staged(folder) as stage:
        begun = [(fault, *next(fault)) for fault in (make(stage) for make in FAULTS)]
        waiting = {(alert, lead) for _, alert, lead in begun}
        tried, running = {alert for alert, _ in waiting}, [fault for fault, _, _ in begun]
        with scraping(programs, folder / "prometheus", stage.targets, text) as prometheus:
            assert prometheus.alerts() == found.rules
            wait_until(lambda: not prometheus.unreached(), what=prometheus.unreached)
            until = time.monotonic() + WITHIN_S
            while waiting and time.monotonic() < until:
                running = [fault for fault in running if next(fault, None) is not None]
                time.sleep(ROUND_S)
                waiting -= prometheus.fired()
    found.silent = {alert: f"it did not fire at {lead} within {WITHIN_S:g} s of its fault" for alert, lead in waiting}
    found.silent |= {alert: "no fault is written for it" for alert in found.rules if alert not in tried}
    return found
