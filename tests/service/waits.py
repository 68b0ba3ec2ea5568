"""Calls that make a transfer and wait for it, and what they wait for."""

from typing import Any

from kvgrpc.v1 import common_pb2, handoff_pb2, transfer_pb2
from tests.service.engines import Engine, wait_until
from tests.service.values import content, dur, new_key, prompt

TOKENS = prompt(16)
LONG_S = 30.0
"""Timeout in seconds, longer than any of these tests takes: each wait ends by its condition."""
PENDING = transfer_pb2.TRANSFER_STATE_PENDING


def waiting(timeout_s: float | None = LONG_S, **fields: Any) -> transfer_pb2.TransferWait:
    return transfer_pb2.TransferWait(timeout=None if timeout_s is None else dur(timeout_s), **fields)


def pulling(source: Engine, destination: Engine, **fields: Any) -> handoff_pb2.PullBlocksRequest:
    """Returns a pull that waits for its end. With `after_step` it does not move until it is cancelled."""
    usual = {
        "grant": source.hand_over(TOKENS).grant,
        "content": content(TOKENS),
        "destination": destination.into(destination.allocate()),
        "wait": waiting(),
    }
    return handoff_pb2.PullBlocksRequest(**{**usual, **fields})


def reserving(source: Engine, destination: Engine, **fields: Any) -> handoff_pb2.ReserveBlocksRequest:
    """Returns a reservation that waits for the end of its push."""
    usual = {
        "transfer_key": new_key(),
        "content": content(TOKENS),
        "blocks": destination.blocks(destination.allocate()),
        "source": common_pb2.PeerAddress(address=source.address),
        "wait": waiting(),
    }
    return handoff_pb2.ReserveBlocksRequest(**{**usual, **fields})


def receives(engine: Engine) -> list[transfer_pb2.Transfer]:
    listed = transfer_pb2.TransferFilter(direction=transfer_pb2.DIRECTION_RECEIVE, states=[PENDING])
    return list(engine.api.transfers.ListTransfers(transfer_pb2.ListTransfersRequest(filter=listed)).transfers)


def begun(engine: Engine) -> transfer_pb2.Transfer:
    """Waits for the only transfer that the engine receives, and returns it."""
    wait_until(lambda: len(receives(engine)) == 1)
    return receives(engine)[0]
