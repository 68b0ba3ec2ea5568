"""One attached engine, as its lead knows it."""

import asyncio
import logging
import secrets
from collections.abc import Sequence

from kvgrpc.errors import OutOfRange
from kvgrpc.service.lead import Lead
from kvgrpc.service.session.void_page import VoidPage
from kvgrpc.service.session.workers import SocketEnd, Workers, write
from kvgrpc.session.v1 import session_pb2
from kvgrpc.wire.frames import encode, encode_rows

_log = logging.getLogger(__name__)


class AttachedEngine:
    """One attached engine: its scheduler's connection, its ticket, its workers, and the events it was not told yet."""

    def __init__(self, lead: Lead, writer: asyncio.StreamWriter, request: session_pb2.AttachRequest) -> None:
        self.writer = writer
        self.secret = secrets.token_bytes(32)
        self.ticket = request.rank_ticket or secrets.token_bytes(32)
        self.workers = Workers(lead.config.data_paths, lead.runner.feed, request.memory)
        self.page = VoidPage()
        self.over = asyncio.Event()
        self._event_id = 0
        self._unsent = session_pb2.ServerFrame()
        """The next frame. Events are made inside it, because putting a message into another one copies it."""
        self._unread: dict[int, str] = {}
        """Ended transfers by the event that told the end, until the engine has read it."""

    def next_event(self, ended: str = "") -> session_pb2.Event:
        """Returns a new event, for the caller to fill in now. It is sent with all others of the same turn of the loop.
        `ended`: the transfer whose end it tells.
        """
        self._event_id += 1
        if ended:
            self._unread[self._event_id] = ended
        unsent = self._unsent.events.events
        if not unsent:
            asyncio.get_running_loop().call_soon(self.flush)
        return unsent.add(event_id=self._event_id)

    def read(self, event_id: int) -> tuple[str, ...]:
        """Notes that the engine has read all events up to this one. Returns the transfers whose ends it knows now."""
        found = [id_ for id_ in self._unread if id_ <= event_id]
        return tuple(self._unread.pop(id_) for id_ in found)

    def close(self, why: str) -> None:
        """Closes its connections. `why` is told to processes that are still there; empty if it is this lead's life that
        ends.
        """
        for end in (SocketEnd(self.writer), *self.workers.ends):
            end.close(why)
        self.page.close()

    def flush(self) -> None:
        """Sends the events that were made."""
        frame, self._unsent = self._unsent, session_pb2.ServerFrame()
        try:
            write(self.writer, encode(frame))
        except OutOfRange:
            for part in encode_rows(frame.events.events, _event_frame, self._cannot_tell):
                write(self.writer, part)

    def _cannot_tell(self, event: session_pb2.Event, error: OutOfRange) -> None:
        """Ends the engine: it would wait for ever for an event that does not fit into a frame."""
        _log.error("event %d (%s) cannot be told: %s", event.event_id, event.WhichOneof("kind"), error)
        self.close(f"event {event.event_id} does not fit into a frame: {error.message}")


def _event_frame(rows: Sequence[session_pb2.Event]) -> session_pb2.ServerFrame:
    return session_pb2.ServerFrame(events=session_pb2.EventBatch(events=rows))
