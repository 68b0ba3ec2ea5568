"""Pins as messages: who keeps blocks from being reused, and why."""

from kvgrpc.core.node import Node
from kvgrpc.core.tables.pins import Pin, PinKind
from kvgrpc.v1 import admin_pb2
from kvgrpc.wire import answers
from kvgrpc.wire.values import duration, pool_blocks


def message(node: Node, pin: Pin, now: float) -> admin_pb2.Pin:
    """Returns a pin with what its owner knows of the request."""
    state = node.state
    request_id = peer = trace = missing = ""
    if pin.kind is PinKind.LEASE:
        lease = state.send.leases.get(pin.owner)
        request_id, trace = lease.request_id, lease.trace
    elif pin.owner.startswith("a-"):
        access = state.access.rows[bytes.fromhex(pin.owner.removeprefix("a-"))]
        request_id, peer = access.opening.request_id, access.consumer
    elif transfer := state.transfers.find(pin.owner.partition("#")[0]):
        request_id, peer, trace = transfer.request_id, transfer.peer_engine_id, transfer.trace
        # Not only a QUARANTINE pin: an ACCESS pin keeps the blocks of an ended push while our own posting reads them.
        missing = node.missing_proof(transfer.id)
    return admin_pb2.Pin(
        kind=answers.PIN_KINDS[pin.kind],
        owner=pin.owner,
        request_id=request_id,
        peer_engine_id=peer,
        age=duration(now - pin.since),
        blocks=pool_blocks(pin.blocks, state.life.incarnation),
        missing_proof=missing,
        trace_id=answers.trace_id(trace),
    )
