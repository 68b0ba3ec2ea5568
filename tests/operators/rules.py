"""The alerts of deploy/prometheus/rules.yaml, shortened so that a fault of seconds fires them.

Ranges, waits and thresholds of time become short. All else of an expression stays as it is.
"""

import re
from pathlib import Path

FILE = Path(__file__).parents[2] / "deploy/prometheus/rules.yaml"
RANGE = "[15s]"
THRESHOLDS = {
    "KvgrpcNoProgress": ("> 10", "> 2"),
    "KvgrpcTransferStuck": ("> 900", "> 5"),
    "KvgrpcLeaseLeak": ("> 900", "> 5"),
    "KvgrpcQuarantineGrows": ("> 60", "> 2"),
    "KvgrpcPeerFlaps": ("> 5", "> 2"),
    "KvgrpcRegistrySilent": ("> 60", "> 2"),
}
"""Threshold of an alert, and the shorter one in its place."""


def names(text: str) -> list[str]:
    """Returns the names of the alerts of a file, in its order."""
    return re.findall(r"^ *- alert: (\w+)$", text, re.MULTILINE)


def shortened(text: str) -> str:
    """Returns the file with shorter times. Fails for an alert that has another threshold than the table says."""
    head, *alerts = re.split(r"(?m)^(?= *- alert: )", text)
    made = [head]
    for alert in alerts:
        (name,) = names(alert)
        short = re.sub(r"\[\d+[smh]\]", RANGE, re.sub(r"(?m)^( *for:) \w+$", r"\1 1s", alert))
        if name in THRESHOLDS:
            long, less = THRESHOLDS[name]
            assert short.count(long) == 1, f"{name} has no threshold {long!r}"
            short = short.replace(long, less)
        made.append(short)
    return "".join(made)
