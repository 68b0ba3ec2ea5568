"""Watches transfers for any length of time, over streams that end, without repeating or losing an event.

Rules:
* A stream is opened after the last message read, in that message's incarnation. A message without a transfer counts,
  too: it says how far the server is while nothing matches. If events may be missing, or the engine has restarted, the
  reader gets a marker in their place and must list.
* Each stream has a deadline like any call. Its expiry is not reported: the next stream continues from there.
* There is a growing, jittered pause between failed streams. If a server cannot be reached for `give_up_s`, the last
  error is raised.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from grpc import aio

from kvgrpc.client import pauses
from kvgrpc.client.caller import Caller
from kvgrpc.client.grpc_status import passes
from kvgrpc.errors import DeadlineExceeded, KVGrpcError, Reason, Unavailable
from kvgrpc.v1.common_pb2 import ResponseHeader
from kvgrpc.v1.transfer_pb2 import Transfer, TransferFilter, WatchTransfersRequest, WatchTransfersResponse


@dataclass(frozen=True)
class HistoryLost:
    """Changes up to `header.event_seq` may be missing: list the transfers. The watch goes on with later changes."""

    header: ResponseHeader


@dataclass(frozen=True)
class IncarnationChanged:
    """The engine has restarted: the leases, grants and transfers of the `previous` incarnation are gone. The watch goes
    on with the transfers of the new one; list those that exist already.
    """

    previous: int
    header: ResponseHeader


WatchEvent = WatchTransfersResponse | HistoryLost | IncarnationChanged
"""A change (its `transfer` is the whole transfer after it), or a marker in place of changes."""


class AnyReply(Protocol):
    """Any reply of this engine."""

    @property
    def header(self) -> ResponseHeader: ...


def point_of(after: AnyReply | ResponseHeader | None) -> tuple[int, int]:
    """Returns the incarnation and the event number to watch after. A reply with one transfer counts as old as that
    transfer, so that no change of it is missed.
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
    """Patience of a watch."""

    give_up_s: float = 60.0
    """Maximum time without a stream before the last error is raised, in seconds."""
    stream_s: float = 60.0
    """Deadline of one stream, in seconds. It bounds how long a dead connection goes unnoticed."""
    pause_first_s: float = 0.1
    pause_max_s: float = 5.0

    @property
    def lasting_s(self) -> float:
        """Minimum life of a stream that counts as a recovery, in seconds."""
        return min(self.pause_max_s, 0.9 * self.stream_s)

    def pause_s(self, failures: int, asked_s: float | None) -> float:
        """Returns the pause before the next stream, in seconds. A longer pause that the server asks for wins."""
        return pauses.growing(failures, asked_s, first_s=self.pause_first_s, max_s=self.pause_max_s)


@dataclass
class Cursor:
    """Position of a watch: the last event read, after which the next stream starts."""

    wanted: TransferFilter
    incarnation: int = 0
    """Incarnation of the last event; 0 before the first: the watch starts with the present."""
    seq: int = 0

    def request(self) -> WatchTransfersRequest:
        return WatchTransfersRequest(
            filter=self.wanted, after_event_seq=self.seq, incarnation=self.incarnation if self.seq else 0
        )

    def start_over(self) -> None:
        """Starts with the present, if the server cannot resume from the cursor. The header of the next stream tells
        why.
        """
        self.seq = 0

    def take(self, message: WatchTransfersResponse, *, first: bool) -> Iterator[WatchEvent]:
        """Yields the reader's events for a message; `first` marks the first message of its stream."""
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
            # A stream cannot be opened after number 0 of a life, so the events since then are missing.
            yield HistoryLost(header)
        self.incarnation, self.seq = header.incarnation, max(self.seq, header.event_seq)
        if message.HasField("transfer"):
            yield message


@dataclass
class Watch:
    """The watch of one reader."""

    caller: Caller
    method: Method
    cursor: Cursor
    pace: Pace = field(default_factory=Pace)

    async def events(self) -> AsyncGenerator[WatchEvent, None]:
        """Yields events until an error, or until its reader stops."""
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
                # A short stream does not count as a recovery: otherwise the loop could spin without a pause.
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
            raise await self.caller.failure(failed, request, self.pace.stream_s) from failed
        finally:
            call.cancel()

    def _check(self, ended: KVGrpcError, away_s: float) -> None:
        """Raises `ended` if another stream would not help."""
        if isinstance(ended, DeadlineExceeded):
            ended.metadata["phase"] = "watch"
        unknown = ended.reason in (Reason.INCARNATION_CHANGED, Reason.HISTORY_LOST)
        if not (unknown or passes(ended)) or away_s > self.pace.give_up_s:
            raise ended
        if unknown:
            self.cursor.start_over()
