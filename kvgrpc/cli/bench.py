"""`kvgrpc bench pull`: measures pulls on this machine."""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from kvgrpc.errors import KVGrpcError

EXIT_USAGE = 2

bench = typer.Typer(name="bench", help="Measure this machine.", no_args_is_help=True)


@bench.callback()
def _root() -> None:
    pass


@bench.command()
def pull(  # noqa: PLR0913, PLR0917 - one argument an option, all by name
    data_paths: Annotated[str, typer.Option(help="Data paths to measure.")] = "shm,cma,nixl",
    sizes: Annotated[
        str | None, typer.Option(help="Block sizes to measure, in KB. Default 4096,64,16; with --quick 16.")
    ] = None,
    layouts: Annotated[str, typer.Option(help="Block orders to measure.")] = "scattered,contiguous",
    parts: Annotated[str, typer.Option(help="What to measure.")] = "bandwidth,latency,leases",
    repeats: Annotated[int | None, typer.Option(help="Pairs for each ratio. Default 9; with --quick 3.")] = None,
    pool_mb: Annotated[int | None, typer.Option(help="MB that each pull moves. Default 256; with --quick 4.")] = None,
    copy_threads: Annotated[int, typer.Option(help="Threads that copy for shm and cma.")] = 2,
    quick: Annotated[bool, typer.Option("--quick", help="Little data: shows that it works, not how fast.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="The result as JSON on standard output.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the result as JSON to a file as well.")] = None,
) -> None:
    """Measure pulls of 256 MB between two servers on this machine, beside memcpy and raw NIXL on the same memory.

    Takes some minutes, and memory for two pools. Every ratio is the median over pairs that were measured one right
    after the other, so that it holds on a machine that does other things, too; single times do not: the load is printed
    beside them.

    Exit codes: 0 measured; 1 something broke; 2 an option is not usable.
    """
    from kvgrpc.bench.plan import LAYOUTS, PARTS, QUICK, Plan
    from kvgrpc.bench.run import run
    from kvgrpc.config import DATA_PATHS

    base = QUICK if quick else Plan()
    pool_bytes = base.pool_bytes if pool_mb is None else pool_mb << 20
    block_bytes = base.block_bytes if sizes is None else _sizes(sizes, pool_bytes)
    if pool_bytes <= 0 or any(pool_bytes % size for size in block_bytes):
        _fail("--pool-mb: a multiple of the block sizes, such as 256")
    plan = replace(
        base,
        data_paths=_choice("data-paths", data_paths, DATA_PATHS),
        block_bytes=block_bytes,
        pool_bytes=pool_bytes,
        layouts=_choice("layouts", layouts, LAYOUTS),
        parts=_choice("parts", parts, PARTS),
        repeats=base.repeats if repeats is None else max(repeats, 1),
        copy_threads=copy_threads,
    )
    try:
        found = asyncio.run(run(plan, lambda what: typer.echo(f"... {what}", err=True)))
    except KVGrpcError as error:
        typer.echo(f"kvgrpc bench: {error}", err=True)
        raise typer.Exit(1) from error
    text = json.dumps(found.to_json(), indent=2)
    if output is not None:
        output.write_text(text + "\n")
    if json_:
        typer.echo(text)
        return
    from rich.console import Console

    from kvgrpc.bench.table import show

    show(found, Console(width=None if sys.stdout.isatty() else 110))


def _choice(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    chosen = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [part for part in chosen if part not in known]
    if unknown or not chosen:
        _fail(f"--{option}: choose from {', '.join(known)}")
    return chosen


def _sizes(text: str, pool_bytes: int) -> tuple[int, ...]:
    """Block sizes in bytes: multiples of 4 KB that fill a pool."""
    sizes = [int(part) << 10 for part in text.split(",") if part.strip().isdigit()]
    if not sizes or any(size == 0 or size % 4096 or pool_bytes % size for size in sizes):
        _fail("--sizes: multiples of 4 that divide the pool, such as 4096,64,16")
    return tuple(sizes)


def _fail(message: str) -> NoReturn:
    typer.echo(f"kvgrpc bench: {message}", err=True)
    raise typer.Exit(EXIT_USAGE)
