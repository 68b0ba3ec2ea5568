"""Reads results that `--output` or `--json` wrote."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_RISING = (
    "gbps", "per_s", "ratio_memcpy", "ratio_raw_nixl", "ratio_gloo", "ratio_nixl_tcp", "ratio_base", "ratio_without",
    "ratio_at_once", "ratio_copies", "coalescing_ratio", "tls_rate_ratio", "ratio_shm", "ratio_tp2_tp1",
)  # fmt: skip
"""Ends of the names of figures of which more is better."""
_BASELINES = ("memcpy_gbps", "raw_nixl_gbps", "gloo_gbps", "nixl_tcp_gbps", "base_gbps", "copy_gbps")
_PLACES = ("machine", "versions", "baselines")
_KINDS = ("_ms", "ratio", "gbps", "_us", "percent", "per_s")


@dataclass(frozen=True)
class Row:
    """One figure of a result."""

    value: float
    rises: bool
    """True if more is better."""
    spread: float | None
    """Distance of the quartiles over the median; None if the result has no repeats of the figure."""


def read(path: Path) -> dict[str, Any]:
    """Returns a stored result. Raises ValueError for a file that is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: no result of `python -m bench`: {error}") from error
    if not isinstance(found, dict) or "machine" not in found or "repeats" not in found:
        raise ValueError(f"{path}: no result of `python -m bench`")
    return found


def rows(result: dict[str, Any]) -> dict[str, Row]:
    """Returns the figures of our own side, by name: those of cases, then the single ones."""
    found: dict[str, Row] = {}
    for case in result.get("cases", []):
        quartiles = case.get("quartiles", {})
        found |= {
            f"{label(case)}: {name}": Row(value, _rises(name), _spread(quartiles.get(name), value))
            for name, value in case.items()
            if _is_figure(name, value)
        }
    nested = {name: value for name, value in result.items() if isinstance(value, dict) and name not in _PLACES}
    flat = result | {f"{name}.{key}": value for name, part in nested.items() for key, value in part.items()}
    return found | {name: Row(value, _rises(name), None) for name, value in flat.items() if _is_figure(name, value)}


def label(case: dict[str, Any]) -> str:
    """Returns the name of a case, which no other case of its run has."""
    if "name" in case:
        parts = [case["name"]] if case["datapath"] in case["name"] else [case["datapath"], case["name"]]
    else:
        parts = [case["datapath"], f"{case['blocks']} x {case['block_bytes'] >> 10} KB", case["layout"]]
    return " ".join(part for part in (*parts, case.get("direction", "")) if part)


def _is_figure(name: str, value: object) -> bool:
    measured = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return measured and name not in _BASELINES and any(kind in name for kind in _KINDS)


def _rises(name: str) -> bool:
    return name.rpartition(".")[2].endswith(_RISING) or name.startswith("full_ratio")


def _spread(quartiles: list[float] | None, median: float) -> float | None:
    return None if quartiles is None else abs(quartiles[1] - quartiles[0]) / median
