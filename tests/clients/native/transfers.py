"""Ends of transfers of engines whose ranks are in C."""

from kvgrpc.engine import Engine, Event, HandOver, Pull
from tests.service.engines import wait_until

WAIT_S = 60.0
"""Timeout for the end of a transfer or a life, in seconds: a busy machine starts a lead in many."""


def end_of(engine: Engine, transfer: HandOver | Pull) -> Event:
    """Returns the last event of a transfer."""
    events: list[Event] = []

    def look() -> bool:
        events.extend(engine.poll(0.05))
        return transfer.over

    wait_until(look, WAIT_S, lambda: events)
    return events[-1]
