"""The last spans that ended, for AdminService.ListSpans: rows of a bounded list, which are no messages until asked for.

The list is one for each process, like the SDK of traces.
"""

import random
import time
from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from opentelemetry.trace import SpanKind

from kvgrpc.core.values.owners import tenant_of
from kvgrpc.errors import note
from kvgrpc.service.callers import PRINCIPAL
from kvgrpc.service.span_makers import Attributes, OpenSpan, SpanMaker

BYTES_PER_SPAN = 1 << 10
"""Memory for each span of the ring, in bytes. Longer spans push out more than one."""
ROW_BYTES = 640
"""Memory of a row without its attributes, in bytes."""
TRANSFER = "kvgrpc.transfer_id"
"""Attribute with the id of a transfer."""
SHARED_MAX = 2
"""Maximum number of attributes of a call, which all spans of its method share."""


class SpanRow(NamedTuple):
    """A span that has ended. Its own context and that of the span that it is within are traceparents."""

    number: int
    context: str
    parent: str
    name: str
    kind: SpanKind
    attributes: Attributes
    start_ns: int
    end_ns: int
    failure: str
    tenant: str | None
    """Tenant of the transfer or of the caller; None for calls between leads and of engines, which have none."""

    @property
    def trace_id(self) -> str:
        return self.context[3:35]

    @property
    def nbytes(self) -> int:
        """Estimate of the memory of the row, in bytes."""
        own = self.attributes if len(self.attributes) > SHARED_MAX else ()
        return ROW_BYTES + 2 * len(self.failure) + sum(100 + len(str(self.attributes[key])) for key in own)


class SpanRing:
    """The last spans, oldest first: so many, of so many bytes."""

    def __init__(self, spans: int) -> None:
        self.spans_max, self._bytes_max = spans, spans * BYTES_PER_SPAN
        self._rows: deque[SpanRow] = deque()
        self._nbytes = 0
        self.numbers = count(1)

    def __iter__(self) -> Iterator[SpanRow]:
        return iter(self._rows)

    def add(self, row: SpanRow) -> None:
        """Adds a row, and drops the oldest of too many."""
        self._rows.append(row)
        self._nbytes += row.nbytes
        while len(self._rows) > self.spans_max or self._nbytes > self._bytes_max:
            self._nbytes -= self._rows.popleft().nbytes

    def of_traces(self, trace_ids: set[str]) -> list[SpanRow]:
        """Returns the spans of these traces, oldest first."""
        return [row for row in self._rows if row.context[3:35] in trace_ids]

    def traces_of(self, transfer_id: str) -> set[str]:
        return {row.trace_id for row in self._rows if row.attributes.get(TRANSFER) == transfer_id}


def seen_by(tenant: str, rows: list[SpanRow]) -> list[SpanRow]:
    """Returns the spans, all of one trace, that a caller of a tenant may see: those of its tenant, and those of no
    known tenant if all transfers of the trace are of its tenant. A caller of none sees all.
    """
    if not tenant:
        return rows
    owners = {row.tenant for row in rows if TRANSFER in row.attributes}
    seen = {tenant, None} if owners == {tenant} else {tenant}
    return [row for row in rows if row.tenant in seen]


class _RingSpan:
    """A span that is kept when it ends, beside what `inner` does with it."""

    __slots__ = ("_inner", "_parent", "_ring", "_start_ns", "_what", "tenant", "traceparent")

    def __init__(
        self, ring: SpanRing, what: tuple[str, SpanKind, Attributes], context: tuple[str, str], start_ns: int,
        inner: OpenSpan | None,
    ) -> None:  # fmt: skip
        self._ring, self._what, self._start_ns, self._inner = ring, what, start_ns, inner
        self.traceparent, self._parent = context
        self.tenant: str | None = None

    def end(self, failure: str = "", error_type: str = "", at_ns: int | None = None) -> None:
        """Keeps the span."""
        if self._inner is not None:
            self._inner.end(failure, error_type, at_ns)
        place = next(self._ring.numbers), self.traceparent, self._parent
        times_ns = self._start_ns, time.time_ns() if at_ns is None else at_ns
        self._ring.add(SpanRow(*place, *self._what, *times_ns, note(failure) if failure else "", self.tenant))


def of_tenant(tenant: str, span: OpenSpan) -> OpenSpan:
    """Returns the span, which is that of a tenant's transfer."""
    if isinstance(span, _RingSpan):
        span.tenant = tenant
    return span


def of_caller(span: OpenSpan) -> OpenSpan:
    """Returns the span, which is that of the served call, with the caller's tenant if it has one."""
    if isinstance(span, _RingSpan):
        span.tenant = tenant_of(PRINCIPAL.get()) or None
    return span


class RingSpans:
    """Spans of a lead that keeps the last of them. `inner` makes those of the SDK, if one is installed: only what it
    records is kept then.
    """

    def __init__(self, ring: SpanRing, inner: SpanMaker | None) -> None:
        self.ring, self._inner = ring, inner

    def records(self, traceparent: str) -> bool:
        """Returns whether a span within that context may be recorded."""
        if self._inner is not None and not self._inner.records(traceparent):
            return False
        return not traceparent or traceparent[54] in "13579bdf"

    def start(
        self, name: str, kind: SpanKind, traceparent: str, attributes: Attributes, start_ns: int | None = None
    ) -> OpenSpan:
        began = time.time_ns() if start_ns is None else start_ns
        inner = self._inner.start(name, kind, traceparent, attributes, began) if self._inner is not None else None
        if inner is not None:
            context = inner.traceparent
            if not context or not self.records(context):
                return inner
        else:
            trace_id = traceparent[3:35] or f"{random.getrandbits(128):032x}"
            context = f"00-{trace_id}-{random.getrandbits(64):016x}-01"
        return _RingSpan(self.ring, (name, kind, attributes), (context, traceparent), began, inner)
