"""The names that queries may have."""

from kvgrpc.service.metrics.families import FAMILIES, MetricKind

_PARTS = {
    MetricKind.HISTOGRAM: ("_bucket", "_sum", "_count"),
    MetricKind.COUNTER: ("_total",),
    MetricKind.GAUGE: ("",),
}
SERIES = {family.name + part for family in FAMILIES for part in _PARTS[family.kind]}
"""Names of all series of a lead's own metrics."""
