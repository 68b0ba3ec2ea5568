"""The spans of a transfer and of its phases. They are made at its end, from the times that the node recorded."""

import time
from collections.abc import Callable, Mapping

from opentelemetry.trace import SpanKind

from kvgrpc.core.tables.transfers import Direction, State, Transfer
from kvgrpc.service import telemetry
from kvgrpc.service.span_ring import TRANSFER, of_tenant


def transfer_ended(clock: Callable[[], float], transfer: Transfer) -> None:
    """Makes the spans of a traced transfer that has just ended: one for it, one for each phase that took time. `clock`
    is the node's clock. A deadline that ended the transfer was a little earlier.
    """
    if transfer.ended is None or not (transfer.trace or telemetry.ring()) or not telemetry.records(transfer.trace):
        return
    spans = telemetry.maker()
    to_wall_ns = time.time_ns() - int(clock() * 1e9)
    name = f"kvgrpc.{transfer.direction.value}"
    began = to_wall_ns + int(transfer.created * 1e9)
    span = of_tenant(
        transfer.tenant, spans.start(name, SpanKind.INTERNAL, transfer.trace, _attributes(transfer), began)
    )
    inner = span.traceparent
    for phase in transfer.phases:
        end = phase.end if phase.end is not None else transfer.ended
        if end > phase.start:
            began = to_wall_ns + int(phase.start * 1e9)
            name = f"kvgrpc.{phase.name}"
            child = of_tenant(transfer.tenant, spans.start(name, SpanKind.INTERNAL, inner, {}, began))
            child.end(at_ns=to_wall_ns + int(end * 1e9))
    failed = str(transfer.failure.reason) if transfer.state is not State.SUCCEEDED and transfer.failure else ""
    span.end(failed, at_ns=to_wall_ns + int(transfer.ended * 1e9))


def _attributes(transfer: Transfer) -> Mapping[str, str | int]:
    found: dict[str, str | int] = {
        TRANSFER: transfer.id,
        "kvgrpc.request_id": transfer.request_id,
        "kvgrpc.state": transfer.state.value,
        "kvgrpc.blocks": transfer.blocks,
        "kvgrpc.bytes": transfer.nbytes,
        "kvgrpc.peer": transfer.peer_engine_id,
    }
    if transfer.direction is Direction.RECEIVE and transfer.paths:
        found["kvgrpc.data_path"] = transfer.paths[0].path.data_path
        found["kvgrpc.descriptors"] = sum(path.descriptors for path in transfer.paths)
    if transfer.failure:
        found["kvgrpc.failure"] = str(transfer.failure.reason)
    return found
