"""The part of a call's time in which spans say what went on, and the stretches in which none does.

A span that others are within says only that they are. The span of an RPC says more at its ends: the call is on its way
there or back, or is read or answered.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.operators.jaeger import Span

CALL = "call"
"""Name of the span round what the client waits for."""
TOLD = "kvgrpc.peer.v1.PeerService/CloseAccess"
"""Name of a call between leads that no other call waits for."""


@dataclass(frozen=True)
class Gap:
    """A stretch of a call in which no span says what went on. Times are in microseconds."""

    start: int
    end: int
    share: float
    """Share of the call."""
    after: str
    before: str
    within: tuple[str, ...]
    """Spans that go on meanwhile."""

    def __str__(self) -> str:
        within = " within " + ", ".join(self.within) if self.within else ""
        return f"{self.share:.3f} of the call after {self.after}, before {self.before}{within}"


def accounted(traces: Iterable[list[Span]], *, ends: bool = True) -> float:
    """Returns the share of the time of all calls in which a span says what went on; without `ends` as if the ends of an
    RPC's span said nothing.
    """
    whole = missing = 0
    for spans in traces:
        whole += sum(call.end - call.start for call in _calls(spans))
        missing += sum(gap.end - gap.start for gap in gaps(spans, ends=ends))
    return 1.0 - missing / whole if whole else 0.0


def gaps(spans: list[Span], *, ends: bool = True) -> list[Gap]:
    """Returns the stretches of a trace's calls in which no span says what went on. `ends` as for `accounted`."""
    said = sorted(_says(spans, ends=ends), key=lambda row: row[:2])
    return [gap for call in _calls(spans) for gap in _gaps(call, spans, said)]


def _calls(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span.name == CALL]


def _gaps(call: Span, spans: list[Span], said: list[tuple[int, int, str]]) -> Iterator[Gap]:
    reached, last = call.start, "its start"
    for start, end, name in (*said, (call.end, call.end, "its end")):
        if end <= reached and start < call.end:
            continue
        until = min(start, call.end)
        if until > reached:
            within = tuple(
                span.name for span in spans if span.parent_id and span.start <= reached and until <= span.end
            )
            yield Gap(reached, until, (until - reached) / (call.end - call.start), last, name, within)
        reached, last = max(reached, end), name
        if reached >= call.end:
            return


def _says(spans: list[Span], *, ends: bool) -> Iterator[tuple[int, int, str]]:
    """Yields start, end and name of each stretch in which a span of a lead or an RPC says what goes on."""
    within: dict[str, list[Span]] = {}
    for span in spans:
        within.setdefault(span.parent_id, []).append(span)
    for span in spans:
        inner, name = within.get(span.span_id, []), f"{span.instance or span.service}/{span.name}"
        if not inner and (span.service != "client" or span.is_rpc):
            yield span.start, span.end, name
        elif ends and span.is_rpc:
            awaited = [one for one in inner if one.name != TOLD] or inner
            yield span.start, min(span.end, *(one.start for one in awaited)), f"the beginning of {name}"
            if (last := max(one.end for one in awaited)) < span.end:
                yield last, span.end, f"the rest of {name}"
