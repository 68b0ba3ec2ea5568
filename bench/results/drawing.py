"""Draws a stored result: our throughput beside the baselines', one panel for each data path."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.results.stored import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
_COLUMNS = 4
_SALT = "kvgrpc"
_SERIES = {
    "gbps": ("kvgrpc", "#0072b2", "o-"),
    "memcpy_gbps": ("memcpy", "#666666", "s--"),
    "raw_nixl_gbps": ("raw NIXL", "#d55e00", "^--"),
    "gloo_gbps": ("raw Gloo", "#009e73", "v--"),
    "nixl_tcp_gbps": ("raw NIXL over TCP", "#cc79a7", "D--"),
    "base_gbps": ("pull or raw NIXL", "#e69f00", "P--"),
    "copy_gbps": ("copies alone", "#666666", "s--"),
    "visible_whole_ms": ("pushed whole", "#666666", "s--"),
    "visible_layerwise_ms": ("layer by layer", "#0072b2", "o-"),
}
"""Name, colour and style of each series, by the field of a case."""
_TITLES = {
    "pull": "Pulls of a whole pool", "push": "Pushes of a whole pool", "geometry": "Pulls between unlike engines",
    "tensors": "Named tensors", "layerwise": "Time left to wait for after a prefill",
}  # fmt: skip


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes the picture of a result to `path`, as PNG or SVG by its suffix. The same result gives the same SVG.

    Raises ValueError if the result has nothing to draw.
    """
    import matplotlib as mpl

    metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    with mpl.rc_context({"svg.hashsalt": _SALT, "svg.fonttype": "none"}):
        picture(result).savefig(path, metadata=metadata, dpi=150)


def picture(result: dict[str, Any]) -> "Figure":
    """Returns the picture of a result. Raises ValueError like `draw`."""
    cases = result.get("cases", [])
    if not cases:
        raise ValueError("the result has no cases to draw")
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _panels(cases)
    with mpl.rc_context({"font.size": 9}):
        columns = min(len(panels), _COLUMNS)
        lines = math.ceil(len(panels) / columns)
        height = 2.2 if "block_bytes" in cases[0] or "tensor_bytes" in cases[0] else 3.4
        figure = Figure(figsize=(max(2.6 * columns, 6.5), 1.3 + height * lines), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
        for axis in grid.flat[len(panels) :]:
            axis.remove()
        axes = list(grid.flat[: len(panels)])
        for axis, (title, some) in zip(axes, panels.items(), strict=True):
            _panel(axis, title, some)
        axes[0].set_ylim(bottom=0)  # After all panels, which share the axis: its top is then of all points.
        for axis in axes[::columns]:
            axis.set_ylabel("ms (less is better)" if "visible_ratio" in cases[0] else "GB/s (more is better)")
        named = {name: line for axis in axes for line, name in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.legend(named.values(), named.keys(), loc="outside upper right", ncols=len(named), frameon=False)
        figure.suptitle(
            _TITLES.get(result.get("kind", ""), "Measured by python -m bench"), fontweight="bold", x=0.01, ha="left"
        )
        figure.supxlabel(_note(result), fontsize=7, color="#444444")
    return figure


def _panels(cases: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the cases of each panel: of one data path, and one way or layout where there are several.

    One panel shows all data paths if each has one case.
    """
    if 1 < len(cases) == len({case["datapath"] for case in cases}):
        return {f"blocks of {_size(cases[0]['block_bytes'])}" if "block_bytes" in cases[0] else "": list(cases)}
    split = [name for name in ("layout", "way", "direction") if len({case.get(name) for case in cases}) > 1]
    found: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        found.setdefault(", ".join(str(case[name]).replace("_", " ") for name in ("datapath", *split)), []).append(case)
    return found


def _panel(axis: "Axes", title: str, cases: list[dict[str, Any]]) -> None:
    size = "tensor_bytes" if "tensor_bytes" in cases[0] else "block_bytes"
    by_path = len({case["datapath"] for case in cases}) > 1
    by_size = size in cases[0] and not by_path
    if by_size:
        cases = sorted(cases, key=lambda case: int(case[size]))
    places = range(len(cases))
    for field, (name, colour, style) in _SERIES.items():
        points = [(place, case) for place, case in zip(places, cases, strict=True) if case.get(field) is not None]
        if not points:
            continue
        values = [case[field] for _, case in points]
        spreads = [case.get("quartiles", {}).get(field, [case[field]] * 2) for _, case in points]
        below = [max(value - low, 0) for value, (low, _) in zip(values, spreads, strict=True)]
        above = [max(high - value, 0) for value, (_, high) in zip(values, spreads, strict=True)]
        style_ = style if by_size else style[0]
        xs = [place for place, _ in points]
        axis.errorbar(xs, values, yerr=[below, above], fmt=style_, color=colour, label=name, capsize=2, markersize=4)
    texts = [case["datapath"] if by_path else case.get("name", label(case)) for case in cases]
    if by_size:
        texts = [_size(case[size]) for case in cases]
    flat = by_size or by_path
    axis.set_xticks(list(places), texts, rotation=0 if flat else 60, ha="center" if flat else "right")
    axis.set_xlabel("data path" if by_path else "engines" if not by_size else f"{size.removesuffix('_bytes')} size")
    axis.set_title(title, fontsize=10)
    axis.margins(x=0.12)
    axis.grid(axis="y", color="#dddddd", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _note(result: dict[str, Any]) -> str:
    """Returns where, when and how the result was measured."""
    place = result["machine"]
    where = (
        f"{place['processor']}, {place['cores']} cores, {place['memory_bytes'] / 2**30:.0f} GiB; "
        f"load {place['load_1min']} before the run"
    )
    when = f"{result.get('date', 'no date')}; medians of {result['repeats']} repeats, bars: quartiles where recorded"
    quick = "; --quick: too little data to quote" if result.get("quick") else ""
    return f"{where}\n{when}{quick}\n{result.get('command', '')}"


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KB"
