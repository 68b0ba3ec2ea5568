"""Shows a run's result as tables."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from bench.plan import COLLECTIVE
from bench.results.devices import DeviceResult
from bench.results.geometries import GeometryCase, GeometryResult
from bench.results.pulls import PullCase, PullResult, Run
from bench.results.pushes import LayerwiseCase, LayerwiseResult, PushCase, PushResult
from bench.results.targets import Target
from bench.results.tensors import TensorCase, TensorResult
from bench.results.wording import number, verdict, words

_NIXL = ("raw NIXL,\nGB/s", "of raw\nNIXL")


def show(found: Run, console: Console, *, targets: bool = False, explain: bool = False) -> None:
    """Prints the verdict, the figures and the machine. `targets` adds the project's own targets, `explain` what each
    baseline is.
    """
    for line in verdict(found):
        console.print(line, highlight=False)
    for table in _tables(found, targets=targets):
        console.print(table)
    figures = _figures(found, targets=targets)
    if figures.row_count:
        console.print(figures)
    if targets:
        console.print("red: short of the project's own target, set for an idle machine", highlight=False)
    if isinstance(found, PullResult | PushResult):
        for line in found.profile:
            console.print(line, highlight=False, markup=False, no_wrap=True, overflow="ellipsis")
    for name, what in found.baselines.items() if explain else ():
        in_json = "" if words(name) == name else f" ({name} in JSON)"
        console.print(f"[bold]{words(name)}[/bold]{in_json}: {what}", highlight=False)
    place = found.machine
    console.print(
        f"{place['processor']}, {place['cores']} cores, {place['memory_bytes'] / 2**30:.0f} GiB, Linux "
        f"{place['kernel']}, load {place['load_1min']} before the run; {found.repeats} repeats; "
        + ", ".join(f"{name} {version}" for name, version in found.versions.items()),
        highlight=False,
    )
    if found.quick:
        console.print("[yellow]--quick: too little data for figures to quote[/yellow]")


def _tables(found: Run, *, targets: bool) -> Iterator[Table]:
    """Yields the tables of the run's cases."""
    if isinstance(found, PullResult) and found.cases:
        yield _pulls(found.cases, targets=targets)
    if isinstance(found, PushResult) and found.cases:
        yield _pushes(found.cases, targets=targets)
    if isinstance(found, PullResult | PushResult):
        over_collective = [case for case in found.cases if case.datapath == COLLECTIVE]
        if over_collective:
            yield _between_hosts(over_collective, targets=targets)
    if isinstance(found, LayerwiseResult):
        yield _layerwise(found.cases, targets=targets)
    if isinstance(found, GeometryResult):
        yield _geometries(found.cases, targets=targets)
    if isinstance(found, TensorResult):
        yield _tensors(found.cases, targets=targets)
    if isinstance(found, DeviceResult):
        yield _devices(found)


def _pulls(cases: Sequence[PullCase], *, targets: bool) -> Table:
    checksums = ("of no\nsums", "at once,\nof none") if any(case.ratio_without is not None for case in cases) else ()
    table = _table(
        "Pulls, from the call to the woken waiter; GB/s are 10^9 bytes a second",
        ("path", "blocks", "layout"),
        ("threads", "runs", "GB/s", "control,\nms", "memcpy,\nGB/s", "of\nmemcpy", *_NIXL, *checksums),
    )
    for case in cases:
        bounds = {target.name: target for target in case.targets()} if targets else {}
        summed = {"ratio_without": case.ratio_without, "ratio_at_once": case.ratio_at_once}
        table.add_row(
            case.datapath,
            f"{case.blocks} x {_size(case.block_bytes)}",
            case.layout,
            str(case.threads),
            str(case.descriptors),
            number(case.gbps),
            f"{case.control_ms:.1f}",
            number(case.memcpy_gbps),
            _ratio(case.ratio_memcpy, bounds.get("ratio_memcpy")),
            "-" if case.raw_nixl_gbps is None else number(case.raw_nixl_gbps),
            _ratio(case.ratio_raw_nixl, bounds.get("ratio_raw_nixl")),
            *([_ratio(ratio, bounds.get(name)) for name, ratio in summed.items()] if checksums else ()),
        )
    return table


def _pushes(cases: Sequence[PushCase], *, targets: bool) -> Table:
    table = _table(
        "Pushes, from the call to the woken waiter; GB/s are 10^9 bytes a second",
        ("path", "blocks", "moved by", "base"),
        ("runs", "GB/s", "control, ms", "base, GB/s", "of base"),
    )
    for case in cases:
        table.add_row(
            case.datapath,
            f"{case.blocks} x {_size(case.block_bytes)}",
            case.mover,
            case.base.replace("_", " ").replace("nixl", "NIXL") or "-",
            str(case.descriptors),
            number(case.gbps),
            f"{case.control_ms:.1f}",
            "-" if case.base_gbps is None else number(case.base_gbps),
            _ratio(case.ratio_base, case.targets()[0] if targets else None),
        )
    return table


def _between_hosts(cases: Sequence[PullCase | PushCase], *, targets: bool) -> Table:
    table = _table(
        "Collective beside what else moves bytes between hosts without RDMA",
        ("case", "way of NIXL"),
        ("GB/s", "raw Gloo,\nGB/s", "of raw\nGloo", "NIXL over TCP,\nGB/s", "of NIXL\nover TCP"),
    )
    for case in cases:
        bounds = {target.name: target for target in case.targets()} if targets else {}
        table.add_row(
            case.name,
            case.nixl_tcp_mode.replace("_", " ") or "-",
            number(case.gbps),
            "-" if case.gloo_gbps is None else number(case.gloo_gbps),
            _ratio(case.ratio_gloo, bounds.get("ratio_gloo")),
            "-" if case.nixl_tcp_gbps is None else number(case.nixl_tcp_gbps),
            _ratio(case.ratio_nixl_tcp, bounds.get("ratio_nixl_tcp")),
        )
    return table


def _layerwise(cases: Sequence[LayerwiseCase], *, targets: bool) -> Table:
    table = _table(
        "Time left to wait for after the end of a prefill, in ms",
        ("path", "blocks in a layer"),
        (
            "layers",
            "one\nlayer",
            "prefill",
            "push\nalone",
            "pushed\nwhole",
            "layer by\nlayer",
            "of\nwhole",
            "layers\nearly",
            "processor\nof P",
            "processor\nof D",
        ),
    )
    for case in cases:
        times = (case.layer_ms, case.prefill_ms, case.whole_ms, case.visible_whole_ms, case.visible_layerwise_ms)
        table.add_row(
            case.datapath,
            f"{case.blocks} x {_size(case.block_bytes)}",
            str(case.layers),
            *(f"{ms:.1f}" for ms in times),
            _ratio(case.visible_ratio, case.targets()[0] if targets else None),
            f"{case.layers_early:.0f}",
            f"{case.part_ms_source:.2f}",
            f"{case.part_ms_destination:.2f}",
        )
    return table


def _geometries(cases: Sequence[GeometryCase], *, targets: bool) -> Table:
    table = _table(
        "Pulls between unlike engines, from the call to the event Received",
        ("path", "engines", "moved"),
        ("pairs", "MB", "runs", "bytes of\na run", "GB/s", "memcpy,\nGB/s", "of\nmemcpy"),
    )
    for case in cases:
        bounds = {target.name: target for target in case.targets()} if targets else {}
        table.add_row(
            case.datapath,
            case.name,
            "re-packed" if case.repack else "by runs",
            str(case.pairs),
            f"{case.nbytes / 2**20:.0f}",
            str(case.runs),
            str(case.run_bytes),
            number(case.gbps),
            number(case.memcpy_gbps),
            _ratio(case.ratio_memcpy, bounds.get("ratio_memcpy")),
        )
    return table


def _tensors(cases: Sequence[TensorCase], *, targets: bool) -> Table:
    table = _table(
        "Named tensors, until the other engine has had the last one",
        ("path", "tensors", "way"),
        ("GB/s", "raw Gloo, GB/s", "of raw Gloo"),
    )
    for case in cases:
        bounds = {target.name: target for target in case.targets()} if targets else {}
        table.add_row(
            case.datapath,
            f"{case.tensors} x {_size(case.tensor_bytes)}",
            case.way.replace("_", " "),
            number(case.gbps),
            number(case.gloo_gbps),
            _ratio(case.ratio_gloo, bounds.get("ratio_gloo")),
        )
    return table


def _devices(found: DeviceResult) -> Table:
    table = _table(
        f"Pulls out of a device ({found.device}) and into it, by way of its mirror; or between engines on it",
        ("path", "blocks", "layout", "direction"),
        ("GB/s", "copies alone, GB/s", "of the copies"),
    )
    for case in found.cases:
        table.add_row(
            case.datapath,
            f"{case.blocks} x {_size(case.block_bytes)}",
            case.layout,
            case.direction,
            number(case.gbps),
            number(case.copy_gbps),
            f"{case.ratio_copies:.2f}",
        )
    return table


def _figures(found: Run, *, targets: bool) -> Table:
    table = _table("Single figures", ("figure",), ("value", *(("project's target",) if targets else ())))
    for target in found.targets():
        if target.value is not None:
            sign = "at least" if target.at_least else "at most"
            text = number(target.value)
            bound = (f"{sign} {target.bound:g}",) if targets else ()
            table.add_row(words(target.name), _colour(text, target) if targets else text, *bound)
    for name, value in found.figures().items():
        if value is not None:
            table.add_row(words(name), number(value))
    return table


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in texts:
        table.add_column(column, no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
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
