"""`python -m bench`: measures pulls, pushes and layer-wise pushes on this machine."""

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from kvgrpc.cli.plain_flags import PlainCommand, PlainGroup
from kvgrpc.errors import KVGrpcError

if TYPE_CHECKING:
    from bench.outputs import Shown
    from bench.plan import Plan
    from bench.results.pulls import Run
    from bench.told import Told

    _Plan = TypeVar("_Plan", bound=Plan)

EXIT_USAGE = 2

bench = typer.Typer(
    name="bench", help="Measure this machine. With --explain a result ends with a glossary.",
    cls=PlainGroup, no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False, rich_markup_mode="rich",
)  # fmt: skip

DataPaths = Annotated[str, typer.Option(help="Data paths to measure.")]
Sizes = Annotated[str | None, typer.Option(help="Block sizes to measure, in KB. Default 4096,64,16; with --quick 16.")]
LayerSizes = Annotated[
    str | None, typer.Option(help="Block sizes to measure, in KB of one layer. Default 64; with --quick 16.")
]
Repeats = Annotated[int | None, typer.Option(help="Pairs for each ratio. Default 9; with --quick 3.")]
PoolMb = Annotated[int | None, typer.Option(help="MB that each transfer moves. Default 256; with --quick 4.")]
CopyThreads = Annotated[int, typer.Option(help="Threads that copy for shm and cma.")]
Quick = Annotated[bool, typer.Option("--quick", help="Little data: shows that it works, not how fast.")]
Profile = Annotated[bool, typer.Option("--profile", help="Show where processor time goes, by cProfile.")]
Json = Annotated[bool, typer.Option("--json", help="The result as JSON on standard output.")]
Output = Annotated[Path | None, typer.Option(help="Write the result as JSON to a file as well.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the result beside its baselines, to a file .png or .svg.")]
Targets = Annotated[bool, typer.Option("--targets", help="Show the project's own targets, and colour by them.")]
StoredResult = Annotated[Path, typer.Argument(help="Result that --output or --json wrote.")]
Explain = Annotated[bool, typer.Option("--explain", help="Add a glossary: what each baseline, column and figure is.")]


@bench.command(cls=PlainCommand)
def pull(  # noqa: PLR0913, PLR0917 - one argument per option, all by name
    data_paths: Annotated[
        str | None, typer.Option(help="Data paths to measure. Default shm,cma,nixl,collective; of cuda also cuda_vmm.")
    ] = None,
    sizes: Sizes = None,
    layouts: Annotated[str, typer.Option(help="Block orders to measure.")] = "scattered,contiguous",
    parts: Annotated[
        str | None, typer.Option(help="What to measure. Default bandwidth,latency,leases,rate,tls,metrics.")
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Short for --parts tls.")] = False,
    checksum: Annotated[
        bool,
        typer.Option(
            "--checksum", help="Bandwidth with checksums: with the source's sums at hand, at once, and without."
        ),
    ] = False,
    device: Annotated[
        str, typer.Option(help="host, or cuda: the memory of one of two engines, behind a mirror; of both by cuda_vmm.")
    ] = "host",
    repeats: Repeats = None,
    pool_mb: PoolMb = None,
    copy_threads: CopyThreads = 2,
    profile: Profile = False,
    quick: Quick = False,
    json_: Json = False,
    output: Output = None,
    plot: Plot = None,
    targets: Targets = False,
    explain: Explain = False,
) -> None:
    """Measure pulls of 256 MB between two servers on this machine, beside memcpy and raw NIXL on the same memory.

    Over collective beside raw Gloo and raw NIXL over TCP, which are what else moves bytes between hosts. Takes some
    minutes, and memory for two pools. Every ratio is the median over pairs that were measured one right after the
    other, so that it holds on a machine that does other things, too; single times do not: the load is printed beside
    them. With --device cuda bandwidth is measured out of the memory of a GPU and into it, by way of a mirror, and by
    cuda_vmm between two engines on that GPU, beside the copies alone.

    Exit codes: 0 measured, or skipped since there is no such device; 1 something broke; 2 an option is not usable.
    """
    from bench.measures.devices import DEVICES, missing
    from bench.plan import HOST_PATHS, LAYOUTS, PARTS, PULL_QUICK, PullPlan
    from bench.run import run_devices, run_pull
    from kvgrpc.config import DATA_PATHS, WINDOW

    shown = _shown(json_=json_, output=output, plot=plot, targets=targets, explain=explain)

    usual = HOST_PATHS if device == "host" else DATA_PATHS
    known = (*usual, WINDOW)
    paths = ",".join(usual) if data_paths is None else data_paths
    plan = _plan(PULL_QUICK if quick else PullPlan(), paths, known, sizes, pool_mb, repeats, copy_threads)
    if tls and parts is not None:
        _fail("--tls: not with --parts")
    parts = "tls" if tls else parts
    if checksum and parts is not None:
        _fail("--parts: not with --checksum, which measures bandwidth")
    chosen = ("bandwidth",) if checksum else PARTS if parts is None else _choice("parts", parts, PARTS)
    plan = replace(plan, layouts=_choice("layouts", layouts, LAYOUTS), parts=chosen, checksum=checksum)
    if device not in DEVICES:
        _fail(f"--device: choose from {', '.join(DEVICES)}")
    if device != "host":
        if checksum or parts is not None or profile:
            _fail("--device: not with --parts, --checksum or --profile")
        if why := missing(device):
            typer.echo(f"SKIP: {why}")
        else:
            _measure(lambda told: run_devices(plan, device, told), plan.device_steps(), shown)
        return
    _measure(lambda told: run_pull(plan, told, profile=profile), plan.steps(), shown)


@bench.command(cls=PlainCommand)
def push(  # noqa: PLR0913, PLR0917 - one argument per option, all by name
    data_paths: DataPaths = "shm,cma,nixl,collective,nixl-tcp",
    sizes: Sizes = None,
    repeats: Repeats = None,
    pool_mb: PoolMb = None,
    copy_threads: CopyThreads = 2,
    profile: Profile = False,
    quick: Quick = False,
    json_: Json = False,
    output: Output = None,
    plot: Plot = None,
    targets: Targets = False,
    explain: Explain = False,
) -> None:
    """Measure pushes of 256 MB between two servers on this machine, beside pulls and raw NIXL on the same memory.

    Also a push of one block to the woken consumer, and the processor time of the leads alone. nixl-tcp is nixl with
    UCX_TLS=tcp, as between two hosts. Over nixl-writes and nixl-tcp-writes the source writes. Takes some minutes; about
    ratios and times see `python -m bench pull`.

    Exit codes: 0 measured; 1 something broke; 2 an option is not usable.
    """
    from bench.plan import PUSH_PATHS, PUSH_QUICK, WRITING_PATHS, PushPlan
    from bench.run import run_push

    shown = _shown(json_=json_, output=output, plot=plot, targets=targets, explain=explain)

    known = (*PUSH_PATHS, *WRITING_PATHS)
    plan = _plan(PUSH_QUICK if quick else PushPlan(), data_paths, known, sizes, pool_mb, repeats, copy_threads)
    _measure(lambda told: run_push(plan, told, profile=profile), plan.steps(), shown)


@bench.command(cls=PlainCommand)
def layerwise(  # noqa: PLR0913, PLR0917 - one argument per option, all by name
    data_paths: DataPaths = "shm,cma,nixl,collective,nixl-tcp",
    sizes: LayerSizes = None,
    repeats: Repeats = None,
    pool_mb: PoolMb = None,
    copy_threads: CopyThreads = 2,
    quick: Quick = False,
    json_: Json = False,
    output: Output = None,
    plot: Plot = None,
    targets: Targets = False,
    explain: Explain = False,
) -> None:
    """Measure what is left to wait for after a synthetic prefill of 32 layers: blocks pushed whole, or layer by layer.

    A layer is finished at a fixed pace, at which the prefill takes 1.5 times as long as moving all its blocks. About
    ratios and times see `python -m bench pull`.

    Exit codes: 0 measured; 1 something broke; 2 an option is not usable.
    """
    from bench.plan import LAYERS, LAYERWISE_QUICK, PUSH_PATHS, LayerwisePlan
    from bench.run import run_layerwise

    shown = _shown(json_=json_, output=output, plot=plot, targets=targets, explain=explain)

    base = LAYERWISE_QUICK if quick else LayerwisePlan()
    plan = _plan(base, data_paths, PUSH_PATHS, sizes, pool_mb, repeats, copy_threads, LAYERS)
    _measure(lambda told: run_layerwise(plan, told), plan.steps(), shown)


@bench.command(cls=PlainCommand)
def geometry(  # noqa: PLR0913, PLR0917 - one argument per option, all by name
    data_paths: DataPaths = "shm",
    cases: Annotated[str | None, typer.Option(help="Pairs of engines to measure, by name; default all.")] = None,
    repeats: Repeats = None,
    pool_mb: PoolMb = None,
    copy_threads: CopyThreads = 2,
    quick: Quick = False,
    json_: Json = False,
    output: Output = None,
    plot: Plot = None,
    targets: Targets = False,
    explain: Explain = False,
) -> None:
    """Measure pulls between engines whose ranks, heads, blocks or orders differ, beside memcpy of the same runs.

    About ratios and times see `python -m bench pull`.

    Exit codes: 0 measured; 1 something broke; 2 an option is not usable.
    """
    from bench.geometries import NAMES
    from bench.plan import GEOMETRY_QUICK, HOST_PATHS, GeometryPlan
    from bench.run import run_geometry

    shown = _shown(json_=json_, output=output, plot=plot, targets=targets, explain=explain)

    base = GEOMETRY_QUICK if quick else GeometryPlan()
    plan = _plan(base, data_paths, HOST_PATHS, None, pool_mb, repeats, copy_threads)
    names = NAMES if cases is None else _choice("cases", cases, NAMES)
    plan = replace(plan, names=names)
    _measure(lambda told: run_geometry(plan, told), plan.steps(), shown)


@bench.command(cls=PlainCommand)
def tensors(  # noqa: PLR0913, PLR0917 - one argument per option, all by name
    data_paths: DataPaths = "collective,shm",
    sizes: Annotated[
        str | None, typer.Option(help="Sizes of a tensor, in KB. Default 65536,16384,4096,1024; with --quick 256.")
    ] = None,
    repeats: Repeats = None,
    pool_mb: PoolMb = None,
    quick: Quick = False,
    json_: Json = False,
    output: Output = None,
    plot: Plot = None,
    targets: Targets = False,
    explain: Explain = False,
) -> None:
    """Measure named tensors between two engines, put and fetched, beside raw Gloo with one message a tensor.

    Also a store at its limit. About ratios and times see `python -m bench pull`.

    Exit codes: 0 measured; 1 something broke; 2 an option is not usable.
    """
    from bench.plan import HOST_PATHS, TENSORS_QUICK, TensorsPlan
    from bench.run import run_tensors

    shown = _shown(json_=json_, output=output, plot=plot, targets=targets, explain=explain)

    base = TENSORS_QUICK if quick else TensorsPlan()
    plan = _plan(base, data_paths, HOST_PATHS, sizes, pool_mb, repeats, base.copy_threads)
    _measure(lambda told: run_tensors(plan, told), plan.steps(), shown)


def _plan(  # noqa: PLR0913, PLR0917 - the options that all commands have
    base: "_Plan",
    data_paths: str,
    known_paths: tuple[str, ...],
    sizes: str | None,
    pool_mb: int | None,
    repeats: int | None,
    copy_threads: int,
    layers: int = 1,
) -> "_Plan":
    """Returns the plan that the options ask for. Ends the command for an unusable option."""
    if repeats is not None and repeats < 1:
        _fail("--repeats: 1 or more")
    if copy_threads < 1:
        _fail("--copy-threads: 1 or more")
    pool_bytes = base.pool_bytes if pool_mb is None else pool_mb << 20
    block_bytes = base.block_bytes if sizes is None else _sizes(sizes, pool_bytes, layers)
    if pool_bytes <= 0 or any(pool_bytes % (size * layers) for size in block_bytes):
        _fail("--pool-mb: a multiple of the block sizes, such as 256")
    return replace(
        base,
        data_paths=_choice("data-paths", data_paths, known_paths),
        block_bytes=block_bytes,
        pool_bytes=pool_bytes,
        repeats=base.repeats if repeats is None else repeats,
        copy_threads=copy_threads,
    )


def _shown(*, json_: bool, output: Path | None, plot: Path | None, targets: bool, explain: bool) -> "Shown":
    """Returns where a result goes. Ends the command for a file that cannot be written, before anything is measured."""
    from bench.outputs import Shown

    try:
        return Shown.checked(json_, output, plot, targets=targets, explain=explain)
    except ValueError as error:
        _fail(str(error))


def _measure(run: "Callable[[Told], Coroutine[Any, Any, Run]]", steps: int, shown: "Shown") -> None:
    """Runs a measurement and shows its result."""
    from bench.told import Told

    try:
        with Told(steps) as told:
            found = asyncio.run(run(told))
        shown.write(found, ["python", "-m", "bench", *sys.argv[1:]])
    except (KVGrpcError, ValueError, OSError) as error:
        typer.echo(f"python -m bench: {error}", err=True)
        raise typer.Exit(1) from error


@bench.command(cls=PlainCommand)
def plot(result: StoredResult, file: Annotated[Path, typer.Argument(help="Picture to write, .png or .svg.")]) -> None:
    """Draw a stored result beside its baselines."""
    from bench.outputs import check_picture
    from bench.results.drawing import draw

    found = _read(result)
    try:
        check_picture("FILE", file)
        draw(found, file)
    except ValueError as error:
        _fail(str(error))


@bench.command(cls=PlainCommand)
def compare(
    a: StoredResult,
    b: StoredResult,
    fail_above: Annotated[
        float | None, typer.Option(help="Exit with 1 if a figure of B is worse than A's by more than this factor.")
    ] = None,
    json_: Json = False,
) -> None:
    """Compare two stored results: the figures that both have, their ratio, and which changed beyond noise.

    Noise is the wider distance of quartiles of both, over the median. Figures without recorded repeats count as changed
    from 15 % on.

    Exit codes: 0 compared; 1 a figure is worse than --fail-above; 2 an option or a file is not usable.
    """
    from bench.outputs import console
    from bench.results.comparison import compare as changes_of, show_changes, to_json

    if fail_above is not None and fail_above < 1:
        _fail("--fail-above: 1 or more, such as 1.2")
    changes = changes_of(_read(a), _read(b))
    if not changes:
        _fail(f"{a} and {b} have no figure in common")
    if json_:
        typer.echo(json.dumps(to_json(changes), indent=2))
    else:
        show_changes(changes, console())
    if fail_above is not None and any(change.slowdown > fail_above for change in changes):
        raise typer.Exit(1)


def _read(path: Path) -> dict[str, Any]:
    from bench.results.stored import read

    try:
        return read(path)
    except ValueError as error:
        _fail(str(error))


def _choice(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    chosen = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [part for part in chosen if part not in known]
    if unknown or not chosen:
        _fail(f"--{option}: choose from {', '.join(known)}")
    return chosen


def _sizes(text: str, pool_bytes: int, layers: int) -> tuple[int, ...]:
    """Returns the block sizes in bytes: multiples of 4 KB that fill a pool."""
    sizes = [int(part) << 10 for part in text.split(",") if part.strip().isdigit()]
    if not sizes or any(size == 0 or size % 4096 or pool_bytes % (size * layers) for size in sizes):
        _fail("--sizes: multiples of 4 that divide the pool, such as 4096,64,16")
    return tuple(sizes)


def _fail(message: str) -> NoReturn:
    typer.echo(f"python -m bench: {message}", err=True)
    raise typer.Exit(EXIT_USAGE)
