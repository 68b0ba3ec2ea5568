"""`kvgrpc demo`: the whole job on real input, shown side by side."""

import asyncio
import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from kvgrpc.errors import KVGrpcError

if TYPE_CHECKING:
    from rich.tree import Tree

    from kvgrpc.demo.run import Result
    from kvgrpc.demo.spans import Span


class DataPath(StrEnum):
    """What may be asked for."""

    AUTO = "auto"
    SHM = "shm"
    CMA = "cma"
    NIXL = "nixl"


def demo(
    datapath: Annotated[DataPath, typer.Option(help="Data path; auto takes the best.")] = DataPath.AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    corrupt_block: Annotated[
        bool, typer.Option(help="Change a received block before decoding: the comparison must fail.")
    ] = False,
    swap_grants: Annotated[
        bool, typer.Option(help="Give two requests each other's grants: both must be refused.")
    ] = False,
) -> None:
    """Split a small transformer across two engines and show that the tokens are those of one engine.

    Starts two servers (P prefills, D decodes) and three engine processes: one attached to each server, and one that
    does both by itself. Exit code 0 when every token is equal and nothing is left behind, else 1.
    """
    from kvgrpc.demo.run import Options, run

    try:
        result = asyncio.run(run(datapath.value, Options(corrupt_block, swap_grants)))
    except (KVGrpcError, TimeoutError) as error:
        typer.echo(f"kvgrpc demo: {str(error) or 'a process did not answer in time'}", err=True)
        raise typer.Exit(1) from error
    raise typer.Exit(report(result, as_json))


def report(result: "Result", as_json: bool) -> int:
    """Says what came of it; the exit code."""
    if as_json:
        typer.echo(json.dumps(result.as_json()))
    else:
        _show(result)
    return 0 if result.identical else 1


PHASES = ("queue", "handshake", "open", "wire", "settle")


def _show(result: "Result") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.tree import Tree

    console = Console()
    title = "Tokens decoded at D from KV that P computed, against one engine that did both; times in ms"
    table = Table(title=title, padding=(0, 1, 0, 0), box=None, header_style="bold")
    for column in ("prompt", "tokens", "equal", "blocks", "KiB", "path", "queue", "shake", "open", "wire", "settle"):
        table.add_column(column, justify="left" if column in ("prompt", "path") else "right", no_wrap=True)
    for p in result.prompts:
        phases = [f"{p.ms[name]:.1f}" if name in p.ms else "" for name in PHASES]
        equal = "[green]yes[/]" if p.tokens_equal else "[red]no[/]"
        kib = f"{p.nbytes / 1024:,.0f}"
        table.add_row(p.name, str(p.prompt_tokens), equal, str(p.blocks), kib, p.data_path, *phases)
    console.print(table)
    console.print()
    for p in result.prompts:
        console.print(f"[bold]{p.name}[/]", highlight=False)
        console.print(f"  D: {p.error or _text(p.tokens)}", highlight=False, markup=False)
        console.print(f"  1: {_text(p.reference)}", highlight=False, markup=False)
    console.print(f"\nleases left: {result.leases_left}   pinned blocks left: {result.pinned_blocks_left}\n")
    tree = Tree(f"trace {result.trace_id}")
    for span in result.trace:
        _grow(tree, span)
    console.print(tree)
    verdict = "[green]identical[/]" if result.identical else "[red]NOT identical[/]"
    console.print(f"\n{verdict}: {sum(p.tokens_equal for p in result.prompts)} of {len(result.prompts)} prompts")


def _text(tokens: list[int]) -> str:
    return repr(bytes(token for token in tokens if token < 256).decode(errors="replace"))


def _grow(tree: "Tree", span: "Span") -> None:
    path = span.attributes.get("kvgrpc.data_path")
    detail = f", {int(span.attributes['kvgrpc.bytes']):,} bytes over {path}" if path else ""
    branch = tree.add(f"{span.name} [dim]at {span.service}, {span.ms:.2f} ms{detail}[/]")
    for child in span.children:
        _grow(branch, child)
