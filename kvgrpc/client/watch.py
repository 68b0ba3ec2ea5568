"""Watching transfers for as long as one likes, over streams that end: what is read is neither repeated nor lost.

Rules:
* A stream is opened after the last message that was read, in the life that it belongs to; one without a transfer counts
  too: it says how far the server is while nothing matches. Where events may be missing, or the engine has started over,
  the reader gets a marker in their place and lists; it is never left to guess.
* Each stream has a deadline like any call. That it ends then is no news: the next one goes on where it stopped.
* Between streams that failed there is a growing, jittered pause. A server that cannot be reached for `give_up_s` is
  the reader's problem: the last error is raised.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from grpc import aio

from kvgrpc.client import pauses
from kvgrpc.client.calls import Caller
from kvgrpc.client.status import passes
from kvgrpc.errors import DeadlineExceeded, KVGrpcError, Reason, Unavailable
from kvgrpc.v1.common_pb2 import ResponseHeader
from kvgrpc.v1.transfer_pb2 import Transfer, TransferFilter, WatchTransfersRequest, WatchTransfersResponse


@dataclass(frozen=True)
class HistoryLost:
    """Changes up to `header.event_seq` may be missing: list the transfers. The watch goes on with later ones."""

    header: ResponseHeader


@dataclass(frozen=True)
class IncarnationChanged:
    """The engine has started over: what was known of the `previous` incarnation (leases, grants, transfers) is gone.
    The watch goes on with the transfers of the new one; list those that are there already.
    """

    previous: int
    header: ResponseHeader


WatchEvent = WatchTransfersResponse | HistoryLost | IncarnationChanged
"""A change (its `transfer` is the whole transfer after it), or a marker in place of changes."""


class Reply(Protocol):
    """Any reply of this engine."""

    @property
    def header(self) -> ResponseHeader: ...


def point_of(after: Reply | ResponseHeader | None) -> tuple[int, int]:
    """Incarnation and number to watch after. A reply with one transfer counts as old as the transfer in it, so that no
    change of that one is missed.
    """
    if after is None:
        return 0, 0
    if isinstance(after, ResponseHeader):
        return after.incarnation, after.event_seq
    transfer = getattr(after, "transfer", None)
    seen = transfer.event_seq if isinstance(transfer, Transfer) and transfer.event_seq else after.header.event_seq
    return after.header.incarnation, min(seen, after.header.event_seq)


Method = aio.UnaryStreamMultiCallable[WatchTransfersRequest, WatchTransfersResponse]


@dataclass(frozen=True)
class Pace:
    """How patient a watch is."""

    give_up_s: float = 60.0
    """How long no stream may stand before the last error is raised."""
    stream_s: float = 60.0
    """Deadline of one stream, and so the longest that a connection which died silently goes unnoticed."""
    pause_first_s: float = 0.1
    pause_max_s: float = 5.0

    @property
    def lasting_s(self) -> float:
        """A stream that stood this long was a good one."""
        return min(self.pause_max_s, 0.9 * self.stream_s)

    def pause_s(self, failures: int, asked_s: float | None) -> float:
        """Before the next stream, after so many failures in a row. A server's wish counts when it is longer."""
        return pauses.growing(failures, asked_s, first_s=self.pause_first_s, max_s=self.pause_max_s)


@dataclass
class Cursor:
    """What has been read, and so where the next stream starts."""

    wanted: TransferFilter
    incarnation: int = 0
    """0: nothing is known yet, the watch starts with the present."""
    seq: int = 0

    def request(self) -> WatchTransfersRequest:
        """Asks for what comes after the cursor."""
        return WatchTransfersRequest(
            filter=self.wanted, after_event_seq=self.seq, incarnation=self.incarnation if self.seq else 0
        )

    def start_over(self) -> None:
        """The server cannot go on from there: the next stream starts with the present, and its header tells why."""
        self.seq = 0

    def take(self, message: WatchTransfersResponse, *, first: bool) -> Iterator[WatchEvent]:
        """The events that a message means to the reader; `first` of its stream or not."""
        header, previous = message.header, self.incarnation
        if previous not in (0, header.incarnation):
            self.incarnation, self.seq = header.incarnation, 0
            yield IncarnationChanged(previous, header)
        elif message.history_lost:
            yield HistoryLost(header)
        elif message.HasField("transfer"):
            if header.event_seq <= self.seq:
                return
        elif first and previous and not self.seq and header.event_seq:
            # Nothing can be asked for after the number 0 of a life, so what happened since is missing.
            yield HistoryLost(header)
        self.incarnation, self.seq = header.incarnation, max(self.seq, header.event_seq)
        if message.HasField("transfer"):
            yield message


@dataclass
class Watch:
    """One reader's watch."""

    caller: Caller
    method: Method
    cursor: Cursor
    pace: Pace = field(default_factory=Pace)

    async def events(self) -> AsyncGenerator[WatchEvent, None]:
        """Ends by an error only, or when its reader stops."""
        clock = asyncio.get_running_loop().time
        failures, away_since = 0, clock()
        while True:
            opened, stood = clock(), False
            try:
                async with aclosing(self._stream()) as messages:
                    async for message in messages:
                        for event in self.cursor.take(message, first=not stood):
                            yield event
                        stood = True
                ended: KVGrpcError = Unavailable(Reason.PEER_UNREACHABLE, "the server ended the watch")
            except KVGrpcError as error:
                ended = error
            lived_s = clock() - opened
            if stood:
                away_since = clock()
                # A stream that stood only for a moment does not count as a recovery: no loop without a pause.
                failures = 0 if lived_s >= self.pace.lasting_s else failures
            if stood and isinstance(ended, DeadlineExceeded) and lived_s >= self.pace.lasting_s:
                continue
            self._check(ended, clock() - away_since)
            failures += 1
            await asyncio.sleep(self.pace.pause_s(failures, ended.retry_delay_s))

    async def _stream(self) -> AsyncGenerator[WatchTransfersResponse, None]:
        request = self.cursor.request()
        call = self.method(request, timeout=self.pace.stream_s, metadata=self.caller.headers())
        try:
            async for message in call:
                yield message
        except aio.AioRpcError as failed:
            raise self.caller.error(failed, request) from failed
        finally:
            call.cancel()

    def _check(self, ended: KVGrpcError, away_s: float) -> None:
        """Raises when there is no use in another stream."""
        if isinstance(ended, DeadlineExceeded):
            ended.metadata["phase"] = "watch"
        unknown = ended.reason in (Reason.INCARNATION_CHANGED, Reason.HISTORY_LOST)
        if not (unknown or passes(ended)) or away_s > self.pace.give_up_s:
            raise ended
        if unknown:
            self.cursor.start_over()
