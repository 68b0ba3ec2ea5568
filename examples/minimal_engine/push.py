"""Pushes on the demo's engine: the source moves blocks the moment they exist, whole or layer by layer.

The destination does the same in both cases. It waits for each layer, and computes what it can with the layers that are
there. These are provisional, so no token leaves the destination before the transfer has succeeded. It writes nothing
into the blocks, which belong to the transfer until then.
"""

import time
from typing import Any

from torch import Tensor

from examples.minimal_engine.engine import MinimalEngine, Request
from kvgrpc.engine import Push, Reservation, content


def prefill(engine: MinimalEngine, request: Request, grant: bytes, *, layerwise: bool, **labels: Any) -> Push:
    """Computes the KV that is missing, and pushes the prompt to where the grant says."""
    push = engine.engine.push(content(request.ids), **labels)
    push.register(grant)
    engine.given[push] = request.table
    missing = request.ids[request.have_tokens :]
    run = engine.model.begin(missing, request.have_tokens, request.table, engine.kv)
    blocks, last = engine.blocks.cut(request.table, len(request.ids)), len(engine.kv) - 1
    for layer in range(last + 1):
        engine.model.next_layer(run)
        if layerwise and layer < last and engine.blocks.completes(layer):
            push.finished(blocks, layers=(engine.blocks.number(layer), 1))
            engine.engine.flush()
    engine.prefilled_s = time.clock_gettime(time.CLOCK_MONOTONIC)
    push.finished(blocks, layers=(engine.blocks.number(last), 1) if layerwise else None, last=True)
    engine.engine.flush()
    engine.blocks.register(request.table, request.ids)
    return push


def reserve(engine: MinimalEngine, request: Request, **labels: Any) -> Reservation:
    """Reserves the request's blocks for a push, beyond what is here, and waits for the grant. Raises TransferFailed."""
    missing = engine.blocks.cut(request.table, len(request.ids), request.have_tokens)
    reservation = engine.engine.reserve(missing, content(request.ids), have_tokens=request.have_tokens, **labels)
    while not reservation.grant and not reservation.over:
        engine.step(timeout_s=1.0)
    if reservation.over:
        engine.wait(reservation)
    return reservation


def receive(engine: MinimalEngine, request: Request, reservation: Reservation) -> Tensor:
    """Computes the prompt's last token with each layer that comes. Returns the logits once all KV is there and valid.

    Raises TransferFailed: the request then owns its blocks again, and nothing that was computed counts.
    """
    last = len(request.ids) - 1
    run = engine.model.begin(request.ids[last:], last, request.table, engine.kv, writes=False)
    for layer in range(len(engine.kv)):
        _wait_for(engine, reservation, engine.blocks.number(layer))
        engine.model.next_layer(run)
    engine.wait(reservation)
    engine.blocks.filled(request.table, len(request.ids), request.have_tokens)
    request.have_tokens = len(request.ids)
    return engine.model.logits(run)


def _wait_for(engine: MinimalEngine, reservation: Reservation, layer: int) -> None:
    """Waits until the layer with that number within its group is there. Raises TransferFailed."""
    while not reservation.over:
        ranges = engine.layers_here.get(reservation, ())
        if any(first <= layer < first + count for first, count in ranges):
            return
        engine.step(timeout_s=1.0)
    if reservation.failed:
        engine.wait(reservation)
