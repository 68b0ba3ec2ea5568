"""Profiles the processor time of one thread with cProfile. That slows everything down, so only shares are
meaningful.
"""

import cProfile
import os
import pstats
import time
from collections import Counter
from pathlib import Path

import kvgrpc

_ROOT = Path(kvgrpc.__file__).parent.parent
_TOP = 16


def new_profile() -> cProfile.Profile:
    """Returns a profile of processor time: a waiting thread spends none."""
    return cProfile.Profile(time.thread_time)


def describe(profile: cProfile.Profile, what: str, count: int) -> list[str]:
    """Returns a title, the share of each package, and the most expensive functions, for one of `count` repetitions."""
    stats: dict[tuple[str, int, str], tuple[int, int, float, float, object]]
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    total_s = sum(row[2] for row in stats.values()) or 1.0
    calls = sum(row[1] for row in stats.values())
    places: Counter[str] = Counter()
    for (file, _, _), row in stats.items():
        places[_package(file)] += row[2] / total_s  # type: ignore[assignment]
    shares = ", ".join(f"{place} {share:.0%}" for place, share in places.most_common() if share >= 0.01)
    lines = [f"{what}: {total_s / count * 1e3:.2f} ms, {calls / count:.0f} calls: {shares}"]
    worst = sorted(stats.items(), key=lambda item: item[1][2], reverse=True)[:_TOP]
    for (file, line, function), (_, times, own_s, _, _) in worst:
        place = f"{_short(file)}:{line} {function}" if line else function
        lines.append(f"{own_s / count * 1e3:8.3f} ms {own_s / total_s:5.1%} {times / count:7.1f} calls  {place}")
    return lines


def _package(file: str) -> str:
    """Returns the group of a function: a package of ours, another package, or "built-in" if it is not Python."""
    if file == "~":
        return "built-in"
    parts = Path(_short(file)).parts
    return "/".join(parts[:2]) if parts[0] == "kvgrpc" else Path(parts[0]).stem


def _short(file: str) -> str:
    """Returns a file's name relative to its package's folder."""
    path = Path(file)
    for folder in (_ROOT, Path(os.__file__).parent / "site-packages", Path(os.__file__).parent):
        if path.is_relative_to(folder):
            return str(path.relative_to(folder))
    parts = path.parts
    return "/".join(parts[parts.index("site-packages") + 1 :]) if "site-packages" in parts else path.name
