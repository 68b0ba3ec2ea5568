"""The transfers of an engine: which answer and which event is about which handle, and what the engine is told.

No I/O: rows of the session in, events of the engine out. Of every handle the engine is told one end: Received, or
BlocksReturned; before the latter at most one Failed.
"""

from collections.abc import Iterator

from kvgrpc.core.transfers import Next
from kvgrpc.engine.events import BlocksReturned, Event, Failed, PullOpened, Received
from kvgrpc.engine.handles import HandOver, Pull
from kvgrpc.session.v1 import session_pb2
from kvgrpc.v1 import common_pb2
from kvgrpc.wire.values import core_reason

_NEXT = {
    common_pb2.NEXT_STEP_RETRY_HERE: Next.RETRY_HERE,
    common_pb2.NEXT_STEP_RETRY_OTHER_CONSUMER: Next.RETRY_OTHER_CONSUMER,
    common_pb2.NEXT_STEP_FIX_REQUEST: Next.FIX_REQUEST,
}
"""An unknown value reads as RECOMPUTE, which always helps."""


class Transfers:
    """Every handle that is not over."""

    def __init__(self) -> None:
        self._asked: dict[int, HandOver | Pull] = {}
        """By call, until it is answered."""
        self._known: dict[str, HandOver | Pull] = {}
        """By transfer id, until the end."""

    def asked(self, call_id: int, handle: HandOver | Pull) -> None:
        """A call about a handle waits for its answer."""
        self._asked[call_id] = handle

    def take(self, event: session_pb2.Event) -> Iterator[Event]:
        """What the engine is told of a row of the session."""
        match event.WhichOneof("event"):
            case "answer":
                yield from self._answered(event.answer)
            case "opened":
                handle = self._known.get(event.opened.transfer_id)
                if isinstance(handle, Pull):
                    yield PullOpened(handle, event.opened.use_tokens)
            case "received":
                handle = self._known.pop(event.received.transfer_id, None)
                if isinstance(handle, Pull):
                    yield Received(handle, event.received.use_tokens)
            case "failed":
                handle = self._known.get(event.failed.transfer_id)
                if handle is not None:
                    yield from _fail(handle, event.failed.failure, cancelled=event.failed.cancelled)
            case "blocks_returned":
                handle = self._known.pop(event.blocks_returned.transfer_id, None)
                if handle is not None:
                    yield BlocksReturned(handle)
            case _:
                return  # of a newer lead

    def _answered(self, answer: session_pb2.CallAnswer) -> Iterator[Event]:
        handle = self._asked.pop(answer.call_id, None)
        if handle is None:
            return
        if not answer.HasField("failure"):
            if not handle.transfer_id:
                self._begin(handle, answer)
        elif not handle.transfer_id:
            yield from _fail(handle, answer.failure)
            yield BlocksReturned(handle)
        elif handle.transfer_id in self._known and not handle.failed:
            # Its blocks were refused: without them it would hold its source until the cap.
            yield from _fail(handle, answer.failure)
            handle.cancel(f"its blocks were refused: {answer.failure.message}")

    def _begin(self, handle: HandOver | Pull, answer: session_pb2.CallAnswer) -> None:
        """The lead knows the transfer."""
        response = answer.finished_blocks if isinstance(handle, HandOver) else answer.pull_blocks
        handle.transfer_id = response.transfer.transfer_id
        self._known[handle.transfer_id] = handle
        later, handle.later = handle.later, []
        for work in later:
            work()


def _fail(handle: HandOver | Pull, failure: common_pb2.Failure, *, cancelled: bool = False) -> Iterator[Event]:
    """Failed, once: what else goes wrong with a transfer that failed is no news."""
    if handle.failed:
        return
    handle.failed = True
    next_step = _NEXT.get(failure.next, Next.RECOMPUTE)
    yield Failed(handle, core_reason(failure.reason), failure.message, next_step, cancelled)
