"""What tests of spans share: trace contexts, and a maker that keeps its spans."""

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler

from kvgrpc.service import telemetry
from kvgrpc.service.otlp_spans import OtlpSpans

TRACE, PARENT = "ab" * 16, "cd" * 8
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
METHOD = "kvgrpc.v1.PoolService/GetPoolStatus"


class Kept(SpanProcessor):
    """Keeps the spans that ended."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]


def maker(kept: Kept, sampler: Sampler = ALWAYS_ON) -> OtlpSpans:
    return OtlpSpans(Resource({"service.name": "kvgrpc", "service.instance.id": "p"}), sampler, kept)


def recording(patch: pytest.MonkeyPatch) -> Kept:
    """Lets this process record its spans, and returns them."""
    made = Kept()
    patch.setattr(telemetry._Sdk, "installed", True)
    patch.setattr(telemetry._Sdk, "spans", maker(made))
    return made
