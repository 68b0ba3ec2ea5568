"""Watches an engine for any length of time: its state or its offers, and when its server cannot be reached.

Rules:
* Each stream has a deadline like any call; the next one follows at once. A server sends something at least every 5
  seconds, so one that is silent for longer than `SILENCE_S` counts as unreachable, even if its connection stands.
* There is a growing, jittered pause between failed streams, and no limit on attempts: a router wants to know when the
  engine is back. The reader is told once per outage, when it begins.
* An error that another attempt cannot fix is raised: the server does not have the call, or refuses the caller or the
  interval.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message
from grpc import aio

from kvgrpc.client import pauses
from kvgrpc.client.caller import Caller
from kvgrpc.errors import DeadlineExceeded, Exhausted, InternalError, KVGrpcError, Reason, Unavailable
from kvgrpc.v1.handshake_pb2 import WatchEngineResponse
from kvgrpc.v1.lease_pb2 import WatchOffersResponse

STREAM_S = 60.0
"""Deadline of one stream, in seconds."""
SILENCE_S = 15.0
"""Silence after which a server counts as unreachable, in seconds: three times the longest gap that a server leaves."""

_Event = TypeVar("_Event")
_Request = TypeVar("_Request", bound=Message)
_Reply = TypeVar("_Reply", bound=Message)
_PASSING = Unavailable | Exhausted | DeadlineExceeded | InternalError


@dataclass(frozen=True)
class EngineUnreachable:
    """The server cannot be reached: the known state of its engine may be out of date. The watch goes on."""

    error: KVGrpcError


EngineEvent = WatchEngineResponse | EngineUnreachable
"""The engine's current state, or a marker."""
OfferEvent = WatchOffersResponse | EngineUnreachable
"""Changes of the engine's offers, or a marker."""


def watch_engine(
    caller: Caller, method: "aio.UnaryStreamMultiCallable[Any, _Reply]", request: Callable[[], Message]
) -> AsyncGenerator[_Reply | EngineUnreachable, None]:
    """Yields events until an error that another attempt cannot fix, or until its reader stops. `request` makes the
    request of the next stream.
    """
    return again_and_again(lambda: one_stream(caller, method, request()))


async def again_and_again(
    open_stream: Callable[[], AsyncGenerator[_Event, None]],
) -> AsyncGenerator[_Event | EngineUnreachable, None]:
    """Yields the events of one stream after the other, and marks when the server cannot be reached."""
    clock = asyncio.get_running_loop().time
    failures = 0
    while True:
        opened = clock()
        try:
            async with aclosing(open_stream()) as replies:
                async for reply in replies:
                    failures = 0
                    yield reply
            ended: KVGrpcError = Unavailable(Reason.PEER_UNREACHABLE, "the server ended the watch")
        except KVGrpcError as error:
            ended = error
        if not isinstance(ended, _PASSING):
            raise ended
        # The server's silence is a DeadlineExceeded, too, however long the stream has lived.
        by_deadline = isinstance(ended, DeadlineExceeded) and isinstance(ended.__cause__, aio.AioRpcError)
        if by_deadline and clock() - opened >= 0.9 * STREAM_S and not failures:
            continue
        failures += 1
        if failures == 1:
            yield EngineUnreachable(ended)
        await asyncio.sleep(pauses.growing(failures, ended.retry_delay_s))


async def one_stream(
    caller: Caller, method: "aio.UnaryStreamMultiCallable[_Request, _Reply]", request: _Request
) -> AsyncGenerator[_Reply, None]:
    """Yields the replies of one stream."""
    call = method(request, timeout=STREAM_S, metadata=caller.headers())
    replies = aiter(call)
    try:
        while True:
            async with asyncio.timeout(SILENCE_S):
                reply = await anext(replies, None)
            if reply is None:
                return
            yield reply
    except TimeoutError as silent:
        watch = type(request).__name__.removesuffix("Request")
        what = f"{watch} at {caller.address}: nothing was heard for {SILENCE_S:g} s"
        raise DeadlineExceeded(Reason.DEADLINE, what, metadata={"phase": "watch"}) from silent
    except aio.AioRpcError as failed:
        raise await caller.failure(failed, request, STREAM_S) from failed
    finally:
        call.cancel()
