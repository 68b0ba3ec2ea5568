"""What tests of spans share: trace contexts, and a maker that keeps its spans."""

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler

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


def maker(kept: Kept, sampler: Sampler = ALWAYS_ON) -> OtlpSpans:
    return OtlpSpans(Resource({"service.name": "kvgrpc", "service.instance.id": "p"}), sampler, kept)
