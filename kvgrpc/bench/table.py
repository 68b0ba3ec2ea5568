"""A run's result for people."""

from rich import box
from rich.console import Console
from rich.table import Table

from kvgrpc.bench.result import Result, Target, case_targets, figure_targets


def show(found: Result, console: Console) -> None:
    """Prints what was measured, against what, and where."""
    if found.cases:
        console.print(_cases(found))
    console.print(_figures(found))
    for name, what in found.baselines.items():
        console.print(f"[bold]{name}[/bold]: {what}", highlight=False)
    place = found.machine
    console.print(
        f"{place['processor']}, {place['cores']} cores, {place['memory_bytes'] / 2**30:.0f} GiB, Linux "
        f"{place['kernel']}, load {place['load_1min']} before the run; {found.repeats} repeats; "
        + ", ".join(f"{name} {version}" for name, version in found.versions.items()),
        highlight=False,
    )
    if found.quick:
        console.print("[yellow]--quick: too little data for figures to quote[/yellow]")


def _cases(found: Result) -> Table:
    title = "Pulls, from the call to the woken waiter; GB/s are 10^9 bytes a second; red: short of the target"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("path", "blocks", "layout"):
        table.add_column(column, no_wrap=True)
    for column in ("threads", "runs", "GB/s", "control ms", "memcpy", "ratio", "raw NIXL", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for case in found.cases:
        targets = {target.name: target for target in case_targets(case)}
        table.add_row(
            case.datapath,
            f"{case.blocks} x {_size(case.block_bytes)}",
            case.layout,
            str(case.threads),
            str(case.descriptors),
            f"{case.gbps:.1f}",
            f"{case.control_ms:.1f}",
            f"{case.memcpy_gbps:.1f}",
            _ratio(case.ratio_memcpy, targets.get("ratio_memcpy")),
            "-" if case.raw_nixl_gbps is None else f"{case.raw_nixl_gbps:.1f}",
            _ratio(case.ratio_raw_nixl, targets.get("ratio_raw_nixl")),
        )
    return table


def _figures(found: Result) -> Table:
    table = Table(title="Single figures")
    for column, justify in (("figure", "left"), ("value", "right"), ("target", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for target in figure_targets(found):
        if target.value is not None:
            sign = ">=" if target.at_least else "<="
            table.add_row(target.name, _colour(f"{target.value:.3g}", target), f"{sign} {target.bound:g}")
    for name, value in {"lease_us": found.lease_us, "memcpy_whole_gbps": found.memcpy_whole_gbps}.items():
        if value is not None:
            table.add_row(name, f"{value:.3g}", "")
    for name, value in found.details.items():
        table.add_row(name, f"{value:.3g}", "")
    return table


def _ratio(value: float | None, target: Target | None) -> str:
    if value is None:
        return "-"
    text = f"{value:.2f}"
    return text if target is None else _colour(text, target)


def _colour(text: str, target: Target) -> str:
    return f"[green]{text}[/green]" if target.met else f"[red]{text}[/red]"


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KB"
