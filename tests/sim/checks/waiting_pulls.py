"""Transfers as the simulator's checks see them."""

from typing import Any

from kvgrpc.core.tables.transfers import Direction, Phase, Transfer
from kvgrpc.core.values.limits import Limits

KEY = b"k" * 16
LIMITS = Limits()


def send(done: int) -> Transfer:
    return Transfer("t", Direction.SEND, 0.0, KEY, "", consumers_done=done)


def receive(phases: tuple[Phase, ...], **fields: Any) -> Transfer:
    return Transfer("t", Direction.RECEIVE, 0.0, KEY, "", phases=phases, **fields)


HANDSHAKE = Phase("handshake", 0.0)
