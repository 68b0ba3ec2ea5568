"""Spans of several servers as one tree, for `kvgrpc trace`."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvgrpc.cli.listings import as_json
from kvgrpc.client import name_of
from kvgrpc.errors import note
from kvgrpc.v1 import admin_pb2

_TOLD = ("kvgrpc.transfer_id", "kvgrpc.request_id", "kvgrpc.peer", "kvgrpc.data_path", "kvgrpc.bytes")
"""Attributes that a line of the tree has."""


@dataclass
class PlacedSpan:
    """A span of one server, and its place in the tree. `elsewhere`: no server has the span that it is within."""

    address: str
    engine: str
    span: admin_pb2.Span
    depth: int = 0
    offset_ns: int = 0
    elsewhere: bool = False

    def as_json(self) -> dict[str, Any]:
        """Returns the span with the schema's names."""
        kind = name_of(admin_pb2.SpanKind, self.span.kind)
        more = {"depth": self.depth, "offset_ms": self.offset_ns / 1e6, "duration_ms": self.duration_ms, "kind": kind}
        return as_json(self.span) | {"engine": self.engine, "address": self.address, **more}

    @property
    def duration_ms(self) -> float:
        return self.span.duration.ToNanoseconds() / 1e6

    @property
    def text(self) -> str:
        """Name of the span, what is told of it, and why it failed."""
        kind = " (call)" if self.span.kind == admin_pb2.SPAN_KIND_CLIENT else ""
        attributes = self.span.attributes
        told = "".join(f" {key.partition('.')[2]}={attributes[key]}" for key in _TOLD if attributes.get(key))
        parent = f" within {self.span.parent_span_id}, which no server has" if self.elsewhere else ""
        failed = f" FAILED: {self.span.failure}" if self.span.failure else ""
        return note(f"{self.span.name}{kind}{told}{parent}{failed}", 4_096)


def in_order(found: Iterable[PlacedSpan]) -> list[PlacedSpan]:
    """Returns each span once, trace by trace, each below the span that it is within, and siblings by their starts."""
    spans = {(row.span.trace_id, row.span.span_id): row for row in found}
    rows = sorted(spans.values(), key=lambda row: row.span.start_time_ns)
    first: dict[str, int] = {}
    within: dict[tuple[str, str], list[PlacedSpan]] = {}
    roots: list[PlacedSpan] = []
    for row in rows:
        trace_id, parent = row.span.trace_id, row.span.parent_span_id
        row.offset_ns = row.span.start_time_ns - first.setdefault(trace_id, row.span.start_time_ns)
        row.elsewhere = bool(parent) and (trace_id, parent) not in spans
        (roots if not parent or row.elsewhere else within.setdefault((trace_id, parent), [])).append(row)
    order = {trace_id: number for number, trace_id in enumerate(first)}
    waiting = sorted(roots, key=lambda row: order[row.span.trace_id])[::-1]
    made: list[PlacedSpan] = []
    while waiting:
        row = waiting.pop()
        made.append(row)
        for child in reversed(within.get((row.span.trace_id, row.span.span_id), [])):
            child.depth = row.depth + 1
            waiting.append(child)
    return made


def tree(rows: list[PlacedSpan]) -> list[str]:
    """Returns rows that are in order as lines of text."""
    width = max(6, *(len(row.engine) for row in rows)) if rows else 6
    lines: list[str] = []
    trace_id = ""
    for row in rows:
        if row.span.trace_id != trace_id:
            trace_id = row.span.trace_id
            lines += [f"trace {trace_id}", f"{'OFFSET':>12} {'DURATION':>12}  {'ENGINE'.ljust(width)}  SPAN"]
        offset, lasted = f"{row.offset_ns / 1e6:.3f}ms", f"{row.duration_ms:.3f}ms"
        lines.append(f"{offset:>12} {lasted:>12}  {row.engine.ljust(width)}  {'  ' * row.depth}{row.text}")
    return lines
