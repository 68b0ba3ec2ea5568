"""Says figures in a user's words."""

from collections.abc import Iterator

from bench.results.pulls import Run

_ENDS = {
    "_ms_p50": ", median ms", "_ms_p50_busy": " beside a busy thread, median ms", "_ms": ", ms",
    "_us": ", microseconds",    "_gbps": ", GB/s", "_per_s": " a second", "_percent": ", percent",
}  # fmt: skip
_BESIDE = (
    ("ratio_gloo", "raw Gloo"), ("ratio_memcpy", "memcpy"), ("ratio_base", "the same by pull or raw NIXL"),
    ("ratio_copies", "the copies alone"),
)  # fmt: skip


def verdict(found: Run) -> Iterator[str]:
    """Yields a line for each data path: its best throughput, beside a baseline."""
    best: dict[str, dict[str, object]] = {}
    for case in found.to_json().get("cases", []):
        path = case["datapath"]
        if "gbps" in case and (path not in best or case["gbps"] > best[path]["gbps"]):
            best[path] = case
        if "visible_ratio" in case:
            yield (
                f"{path} layer by layer leaves {number(case['visible_layerwise_ms'])} ms to wait for after the "
                f"prefill, {number(case['visible_ratio'])} x of a push of the whole"
            )
    for path, case in best.items():
        beside = next(((case[name], what) for name, what in _BESIDE if case.get(name) is not None), None)
        ratio = "" if beside is None else f", {beside[0]:.2f} x {beside[1]}"
        yield f"{path} moves {case['gbps']:.1f} GB/s at best{ratio}"


def words(name: str) -> str:
    """Returns the name of a figure without underscores, with its unit at the end."""
    for end, unit in _ENDS.items():
        if name.endswith(end):
            return name.removesuffix(end).replace("_", " ") + unit
    return name.replace("_", " ").replace("100k", "with 100,000")


def number(value: float) -> str:
    """Returns a figure with three digits that count, and never with an exponent."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.4f}"
