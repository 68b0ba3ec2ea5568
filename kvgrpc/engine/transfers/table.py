"""The transfers of an engine: maps answers and events of a session to handles, and to the engine's events. No I/O.

The engine is told one end of every handle: Received, or BlocksReturned. At most one Failed comes before BlocksReturned.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from kvgrpc.engine.transfers.events import (
    BlocksReturned,
    Event,
    Failed,
    LayersReceived,
    PartsReturned,
    PullOpened,
    Received,
    Reserved,
)
from kvgrpc.engine.transfers.handles import Handle, HandOver, Pull
from kvgrpc.engine.transfers.pushes import Push, Reservation
from kvgrpc.engine.transfers.void_slots import VoidSlots
from kvgrpc.errors import NextStep, Reason
from kvgrpc.session.v1 import session_pb2
from kvgrpc.v1 import common_pb2, transfer_pb2
from kvgrpc.wire.session import telemetry_from_proto
from kvgrpc.wire.values import PHASES, SIDE, core_reason

_NEXT = {
    common_pb2.NEXT_STEP_RETRY_HERE: NextStep.RETRY_HERE,
    common_pb2.NEXT_STEP_RETRY_OTHER_CONSUMER: NextStep.RETRY_OTHER_CONSUMER,
    common_pb2.NEXT_STEP_FIX_REQUEST: NextStep.FIX_REQUEST,
}
"""Next steps by their value in the schema; an unknown value reads as RECOMPUTE, which always helps."""
_SIDES = {value: side for side, value in SIDE.items()}
_PHASES = {value: name for name, value in PHASES.items()}


class Transfers:
    """The handles that are not over."""

    def __init__(self, page: VoidSlots) -> None:
        self._page = page
        self._asked: dict[int, Handle] = {}
        """Handles by call, until it is answered."""
        self._known: dict[str, Handle] = {}
        """Handles by transfer id, until their end."""
        self._leases: dict[Handle, set[str]] = {}
        """Leases by handle: all that its calls have named, until its end."""

    def asked(self, call_id: int, handle: Handle) -> None:
        """Notes a call about a handle, which waits for its answer."""
        self._asked[call_id] = handle
        if isinstance(handle, HandOver | Push) and handle.lease_id:
            self._leases.setdefault(handle, set()).add(handle.lease_id)

    def lose(self, message: str) -> tuple[list[Handle], list[Event]]:
        """Forgets a dead lead's handles. Returns the transfers that are not over, and what the engine is told now."""
        handles = list(dict.fromkeys([*self._known.values(), *self._asked.values()]))
        self._known.clear()
        self._asked.clear()
        self._leases.clear()
        told: list[Event] = []
        for handle in handles:
            handle.lost = True
            handle.later.clear()
            if not handle.failed:
                handle.failed = True
                told.append(Failed(handle, Reason.ENGINE_LOST, message, NextStep.RECOMPUTE))
        return handles, told

    def take(self, event: session_pb2.Event) -> Iterator[Event]:
        """Yields what the engine is told of a row of the session."""
        kind = event.WhichOneof("kind")
        match kind:
            case "answer":
                yield from self._answered(event.answer)
            case str():
                yield from self._about(kind, getattr(event, kind))
            case None:  # only a newer lead knows this kind
                pass

    def _about(self, kind: str, row: Any) -> Iterator[Event]:
        """Yields what the engine is told of a row about one transfer."""
        handle = self._known.get(row.transfer_id)
        if handle is None:
            return
        if kind in ("received", "blocks_returned"):
            del self._known[handle.transfer_id]
        match kind, handle:
            case "opened", Pull():
                yield PullOpened(handle, row.use_tokens)
            case "layers_received", Reservation():
                layers = tuple((layer.first, layer.count) for layer in row.layers_done)
                yield LayersReceived(handle, layers, row.part_epoch)
            case "received", Pull() | Reservation():
                moved = row.telemetry if row.HasField("telemetry") else None
                yield Received(handle, row.use_tokens, moved and telemetry_from_proto(moved))
            case "failed", _:
                yield from _fail(handle, row.failure, cancelled=row.cancelled)
            case "blocks_returned", _:
                yield self._returned(handle, row.telemetries)
            case "parts_returned", Push() if not self._page.ended(row.lease_id):
                yield PartsReturned(handle)

    def _answered(self, answer: session_pb2.CallAnswer) -> Iterator[Event]:
        handle = self._asked.pop(answer.call_id, None)
        if handle is None:
            return
        if not answer.HasField("failure"):
            if not handle.transfer_id:
                yield from self._begin(handle, answer)
        elif not handle.transfer_id:
            yield from _fail(handle, answer.failure)
            yield from self._did_not_begin(handle)
        elif handle.transfer_id in self._known and not handle.failed:
            # The blocks were refused: without blocks the transfer would hold its source until the cap.
            yield from _fail(handle, answer.failure)
            handle.cancel(f"its blocks were refused: {answer.failure.message}")

    def _begin(self, handle: Handle, answer: session_pb2.CallAnswer) -> Iterator[Event]:
        """Takes the answer that names a new transfer, and yields what the engine is told of it."""
        response = getattr(answer, answer.WhichOneof("response") or "finished_blocks")
        handle.transfer_id = response.transfer.transfer_id
        if not handle.transfer_id and isinstance(handle, Push):
            yield from self._did_not_begin(handle)  # given up before there was anything to move
            return
        if isinstance(handle, Push) and response.transfer.memory == transfer_pb2.MEMORY_DISPOSITION_RETURNED:
            yield from _fail(handle, response.transfer.failure)
            yield self._returned(handle)
            return
        self._known[handle.transfer_id] = handle
        if isinstance(handle, Reservation):
            handle.grant = response.grant.token
            yield Reserved(handle)
        later, handle.later = handle.later, []
        for work in later:
            work()
        if handle.failed:
            handle.cancel("an earlier part of it was refused")

    def _did_not_begin(self, handle: Handle) -> Iterator[Event]:
        """Takes an answer that brought no transfer. The lead has nothing of the handle once no other call about it
        waits for its answer: such a call may still begin a transfer, whose end then brings the blocks back.
        """
        if handle not in self._asked.values():
            yield self._returned(handle)

    def _returned(self, handle: Handle, moved: Iterable[session_pb2.MoveTelemetry] = ()) -> Event:
        """Returns the handle's last event, and frees its slots of the void page."""
        for lease_id in self._leases.pop(handle, ()):
            self._page.ended(lease_id)
        return BlocksReturned(handle, tuple(map(telemetry_from_proto, moved)))


def _fail(handle: Handle, failure: common_pb2.Failure, *, cancelled: bool = False) -> Iterator[Event]:
    """Yields Failed, once: later failures of the same transfer are no news."""
    if handle.failed:
        return
    handle.failed = True
    next_step = _NEXT.get(failure.next, NextStep.RECOMPUTE)
    rank = failure.rank if failure.HasField("rank") else None
    yield Failed(
        handle, core_reason(failure.reason), failure.message, next_step, cancelled,
        _PHASES.get(failure.phase, ""), _SIDES.get(failure.side), rank,
    )  # fmt: skip
