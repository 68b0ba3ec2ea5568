"""Waits for transfers, longer than one call may take, also while the server cannot be reached for a moment."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from grpc import aio

from kvgrpc.client import pauses
from kvgrpc.client.caller import Caller, Options, checked_timeout
from kvgrpc.client.grpc_status import passes
from kvgrpc.client.values import duration, is_over, name_of
from kvgrpc.errors import DeadlineExceeded, KVGrpcError, Reason
from kvgrpc.v1.common_pb2 import TransferPhase
from kvgrpc.v1.handoff_pb2 import PullBlocksRequest, PullBlocksResponse, ReserveBlocksRequest, ReserveBlocksResponse
from kvgrpc.v1.transfer_pb2 import (
    WAIT_FOR_ALL,
    WAIT_FOR_ANY,
    Transfer,
    TransferWait,
    WaitCondition,
    WaitingFor,
    WaitTransferRequest,
    WaitTransferResponse,
    WaitTransfersRequest,
    WaitTransfersResponse,
)

if TYPE_CHECKING:
    from kvgrpc.v1.transfer_pb2_grpc import TransferServiceAsyncStub

ONE_WAIT_S = 30.0
"""Maximum wait of one call, in seconds: half of what a server allows, so that it fits the one-minute limit of some
proxies.
"""
ANSWER_S = 5.0
"""Maximum time for an answer after the server's own timer, in seconds."""

Asked = TypeVar("Asked", WaitTransferRequest, WaitTransfersRequest)
Answered = TypeVar("Answered", WaitTransferResponse, WaitTransfersResponse)
Making = TypeVar("Making", PullBlocksRequest, ReserveBlocksRequest)
Made = TypeVar("Made", PullBlocksResponse, ReserveBlocksResponse)


@dataclass(frozen=True)
class CallerWait:
    """One wait of a caller: its condition and its timeout."""

    caller: Caller
    stub: "TransferServiceAsyncStub"
    until: WaitCondition.ValueType
    timeout_s: float

    def __post_init__(self) -> None:
        checked_timeout(self.timeout_s)

    async def one(self, transfer_id: str) -> Transfer:
        """Returns the transfer once it meets the condition. Raises DeadlineExceeded with its phase."""
        return await self._one(transfer_id, time.monotonic() + self.timeout_s)

    async def begun(
        self, method: "aio.UnaryUnaryMultiCallable[Making, Made]", request: Making, options: Options
    ) -> Transfer:
        """Returns the transfer that a call starts, once it meets the condition. The call itself waits; if it returns
        too early, further calls wait. Raises the error of a refused call, and the errors of `one`.
        """
        until, once_s = time.monotonic() + self.timeout_s, min(self.timeout_s, ONE_WAIT_S)
        request.wait.CopyFrom(TransferWait(until=self.until, timeout=duration(once_s)))
        reply = await self.caller.change(method, request, {**options, "timeout_s": once_s + ANSWER_S})
        if reply.condition_met:
            return reply.transfer
        return await self._one(reply.transfer.transfer_id, until)

    async def many(self, transfer_ids: Sequence[str], any_of: bool) -> WaitTransfersResponse:
        """Returns all transfers once enough of them meet the condition, or at the timeout."""
        wait_for = WAIT_FOR_ANY if any_of else WAIT_FOR_ALL
        request = WaitTransfersRequest(transfer_ids=transfer_ids, until=self.until, wait_for=wait_for)
        return await self._asked(self.stub.WaitTransfers, request, time.monotonic() + self.timeout_s)

    async def _one(self, transfer_id: str, until: float) -> Transfer:
        request = WaitTransferRequest(transfer_id=transfer_id, until=self.until)
        reply = await self._asked(self.stub.WaitTransfer, request, until)
        if not reply.condition_met:
            raise _not_yet(reply.transfer, self.timeout_s)
        return reply.transfer

    async def _asked(
        self, method: "aio.UnaryUnaryMultiCallable[Asked, Answered]", request: Asked, until: float
    ) -> Answered:
        """Returns the last answer before `until`. Raises the error of a refused wait at once, and a transient error
        only if it lasts to the end.
        """
        failures = 0
        while True:
            begun = time.monotonic()
            once_s = min(max(until - begun, 0.0), ONE_WAIT_S)  # a timeout of 0 is answered at once: a last look
            request.timeout.CopyFrom(duration(once_s))
            asked_s = None
            try:
                reply = await self.caller.read(method, request, {"timeout_s": once_s + ANSWER_S})
            except KVGrpcError as error:
                if time.monotonic() >= until or not passes(error):
                    raise
                asked_s = error.retry_delay_s
            else:
                now = time.monotonic()
                if reply.condition_met or now >= until:
                    return reply
                if now - begun >= max(once_s / 2, pauses.FIRST_S):  # it waited: a slow answer takes less
                    failures = 0
                    continue
            # The server is unreachable, or answers without waiting: pause, so that the loop does not spin.
            failures += 1
            await asyncio.sleep(max(min(pauses.growing(failures, asked_s), until - time.monotonic()), 0.0))


def _not_yet(transfer: Transfer, timeout_s: float) -> DeadlineExceeded:
    if is_over(transfer):
        phase = "return"
    else:
        phase = name_of(WaitingFor, transfer.waiting_for)
        if not phase:
            phase = name_of(TransferPhase, transfer.phases[-1].phase) if transfer.phases else "queue"
    return DeadlineExceeded(
        Reason.DEADLINE,
        f"transfer {transfer.transfer_id} is not done after {timeout_s:g} s; it is in its phase {phase}",
        metadata={"phase": phase, "transfer_id": transfer.transfer_id},
    )
