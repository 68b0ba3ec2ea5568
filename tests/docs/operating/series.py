"""Names of the series that Prometheus gets."""

from kvgrpc.service.metrics.families import FAMILIES, MetricKind

_PARTS = {MetricKind.HISTOGRAM: ("_bucket", "_sum", "_count"), MetricKind.COUNTER: ("_total",), MetricKind.GAUGE: ("",)}
SERIES = {family.name + part for family in FAMILIES for part in _PARTS[family.kind]}
