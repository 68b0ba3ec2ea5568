"""Sends a scheduler's steps over one stream: each gets an answer, without the price of a call."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from grpc import aio

from kvgrpc.client import pauses
from kvgrpc.client.caller import Caller
from kvgrpc.client.grpc_status import passes
from kvgrpc.errors import DeadlineExceeded, KVGrpcError, Reason, Unavailable
from kvgrpc.v1.scheduler_pb2 import ScheduleRequest, ScheduleResponse

if TYPE_CHECKING:
    from kvgrpc.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

STREAM_S = 60.0
"""Age of a stream, in seconds, after which the next step opens another."""
ATTEMPTS = 4
"""Maximum number of times that a step is sent: as often as gRPC sends a call that meets UNAVAILABLE (`channel`)."""

Stream = aio.StreamStreamCall[ScheduleRequest, ScheduleResponse]


class StepStream:
    """Sends one step at a time. A stream that failed is not used again: the next attempt opens another."""

    def __init__(self, caller: Caller, stub: "SchedulerServiceAsyncStub") -> None:
        self._caller = caller
        self._stub = stub
        self._stream: Stream | None = None
        self._until_s = 0.0
        """Deadline of the stream, on the event loop's clock."""
        self._turn = asyncio.Lock()

    async def ask(self, make: Callable[[], ScheduleRequest], timeout_s: float) -> ScheduleResponse:
        """Returns the answer to the step that `make` makes when it is the step's turn. A step whose stream is lost is
        sent again, which is safe.

        Raises the error of a refusal, DeadlineExceeded, or Unavailable.
        """
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                return await self._answer(make(), timeout_s)
        except TimeoutError as late:
            what = f"Schedule at {self._caller.address}: no answer within {timeout_s:g} s"
            raise DeadlineExceeded(Reason.DEADLINE, what, metadata={"phase": "step"}) from late

    async def _answer(self, step: ScheduleRequest, timeout_s: float) -> ScheduleResponse:
        failures = 0
        while True:
            try:
                return await self._exchange(step, timeout_s)
            except KVGrpcError as error:
                failures += 1
                if failures == ATTEMPTS or not passes(error):
                    raise
                await asyncio.sleep(pauses.growing(failures, error.retry_delay_s))

    async def _exchange(self, step: ScheduleRequest, timeout_s: float) -> ScheduleResponse:
        try:
            stream = self._standing(timeout_s)
            await stream.write(step)
            reply = await stream.read()
            if isinstance(reply, ScheduleResponse):
                return reply
            raise Unavailable(Reason.PEER_UNREACHABLE, f"{self._caller.address} ended the stream of steps")
        except aio.AioRpcError as failed:
            self._end()
            raise await self._caller.failure(failed, step, timeout_s) from failed
        except asyncio.InvalidStateError as ended:
            self._end()
            raise Unavailable(Reason.PEER_UNREACHABLE, f"{self._caller.address} ended the stream of steps") from ended
        except BaseException:  # a late answer to this step must not be taken for the next one's
            self._end()
            raise

    def _standing(self, timeout_s: float) -> Stream:
        """Returns the stream, or a new one if the old one has ended or would end within this step."""
        now_s = asyncio.get_running_loop().time()
        if self._stream is not None and (self._stream.done() or now_s + timeout_s > self._until_s):
            self._end()
        if self._stream is None:
            lasts_s = STREAM_S + timeout_s
            self._until_s = now_s + lasts_s
            # The trace context of a request is in its RequestArrived: a stream belongs to no request.
            self._stream = self._stub.Schedule(timeout=lasts_s, metadata=self._caller.identity())
        return self._stream

    def _end(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None
