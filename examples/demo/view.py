"""Output of the demo for people."""

from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from examples.demo.results import PromptResult, Result
from examples.demo.spans import Span

LABELS = {"handshake": "shake", "rendezvous": "meet"}
"""Short names of phases, for columns."""


def show(result: Result) -> None:
    """Prints tables, texts and one trace."""
    console = Console()
    console.print(_prompts(result))
    for line in _visible(result):
        console.print(line, highlight=False, soft_wrap=True)
    console.print()
    if result.chat:
        console.print(_chat(result))
        console.print()
    served = [*result.prompts, *(turn.served for turn in result.chat)]
    for p in served:
        console.print(f"[bold]{p.name}[/]", highlight=False)
        console.print(f"  D: {p.error or _text(p.tokens)}", highlight=False, markup=False)
        console.print(f"  1: {_text(p.reference)}", highlight=False, markup=False)
    left = result.left
    console.print(
        f"\nleft: {left.leases} leases, {left.pinned_blocks} pinned blocks, {left.used_blocks} blocks in use\n"
    )
    tree = Tree(f"trace {result.trace_id}")
    for span in result.trace:
        _grow(tree, span)
    console.print(tree)
    verdict = "[green]identical[/]" if result.identical else "[red]NOT identical[/]"
    console.print(f"\n{verdict}: {sum(p.tokens_equal for p in served)} of {len(served)} prompts")


def _table(title: str, columns: list[str], left: tuple[str, ...] = ()) -> Table:
    table = Table(title=title, title_justify="left", padding=(0, 1, 0, 0), box=None, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return table


def _prompts(result: Result) -> Table:
    options = result.options
    title = "At D, from KV of P, against one engine that does both; in ms"
    columns = ["prompt", "tokens", "equal", "blocks", "KiB", "path"]
    columns += [LABELS.get(name, name) for name in options.phases]
    columns += ["visible", "whole"] if options.layerwise else ["visible"]
    table = _table(title, columns, ("prompt", "path"))
    for p in result.prompts:
        times = [*(p.ms.get(name) for name in options.phases), p.visible_ms]
        if options.layerwise:
            times.append(p.whole_visible_ms)
        shown = ["" if ms is None else f"{ms:.1f}" for ms in times]
        kib = f"{p.nbytes / 1024:,.0f}"
        table.add_row(p.name, str(p.prompt_tokens), _equal(p), str(p.blocks), kib, p.data_path, *shown)
    return table


def _visible(result: Result) -> list[str]:
    """Returns lines that explain the times and the gain by layers."""
    lines = ["visible: from the end of P's prefill until D may use the KV"]
    if result.visible_ratio is None:
        return lines
    most = max(result.prompts, key=lambda p: p.nbytes)
    lines += [
        "whole: the same when the prompt is pushed whole",
        f"median of visible over median of whole: {result.visible_ratio:.2f}; "
        f"of the largest prompt, {most.name}: {most.visible_ms / (most.whole_visible_ms or 1.0):.2f}",
    ]
    if result.visible_ratio < 1:
        lines.append("by layer the push is under way when prefill ends, and only the last layer is left to move")
    else:
        lines.append("no gain by layer here: the messages about each of these small layers take longer than its bytes")
    return lines


def _chat(result: Result) -> Table:
    columns = ["turn", "tokens", "equal", "P had", "D offered", "P pulled", "renewed", "blocks to D", "visible"]
    table = _table("One conversation: P takes the KV of D's replies back, unless it is little", columns, ("turn",))
    for turn in result.chat:
        p = turn.served
        counts = (turn.held_tokens, turn.offered_tokens, turn.pulled_tokens, turn.renewals, p.blocks)
        table.add_row(p.name, str(p.prompt_tokens), _equal(p), *map(str, counts), f"{p.visible_ms:.1f}")
    return table


def _equal(p: PromptResult) -> str:
    return "[green]yes[/]" if p.tokens_equal else "[red]no[/]"


def _text(tokens: list[int]) -> str:
    return repr(bytes(token for token in tokens if token < 256).decode(errors="replace"))


def _grow(tree: Tree, span: Span) -> None:
    path = span.attributes.get("kvgrpc.data_path")
    detail = f", {int(span.attributes['kvgrpc.bytes']):,} bytes over {path}" if path else ""
    branch = tree.add(f"{span.name} [dim]at {span.service}, {span.ms:.2f} ms{detail}[/]")
    for child in span.children:
        _grow(branch, child)
