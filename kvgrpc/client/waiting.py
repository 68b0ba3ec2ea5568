"""Waiting for transfers, longer than one call may take, also while the server cannot be reached for a moment."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from grpc import aio

from kvgrpc.client.calls import Caller, checked_timeout
from kvgrpc.client.values import duration, is_over, name_of
from kvgrpc.errors import DeadlineExceeded, Reason, Unavailable
from kvgrpc.v1.common_pb2 import TransferPhase
from kvgrpc.v1.transfer_pb2 import (
    WAIT_FOR_ALL,
    WAIT_FOR_ANY,
    Transfer,
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
"""Of one call; half of what a server allows, so that proxies with a limit of a minute let it pass."""
ANSWER_S = 5.0
"""How long the answer may take after the server's own timer."""
PAUSE_FIRST_S = 0.1
PAUSE_MAX_S = 2.0


Asked = TypeVar("Asked", WaitTransferRequest, WaitTransfersRequest)
Answered = TypeVar("Answered", WaitTransferResponse, WaitTransfersResponse)


@dataclass(frozen=True)
class Wait:
    """One wait of a caller: until when, for what."""

    caller: Caller
    stub: "TransferServiceAsyncStub"
    until: WaitCondition.ValueType
    timeout_s: float

    def __post_init__(self) -> None:
        checked_timeout(self.timeout_s)

    async def one(self, transfer_id: str) -> Transfer:
        """The transfer once it meets the condition. Raises DeadlineExceeded with its phase."""
        request = WaitTransferRequest(transfer_id=transfer_id, until=self.until)
        reply = await self._asked(self.stub.WaitTransfer, request)
        if not reply.condition_met:
            raise _not_yet(reply.transfer, self.timeout_s)
        return reply.transfer

    async def many(self, transfer_ids: Sequence[str], any_of: bool) -> WaitTransfersResponse:
        """All of them, once as many as are asked for meet the condition, or the time is over."""
        wait_for = WAIT_FOR_ANY if any_of else WAIT_FOR_ALL
        request = WaitTransfersRequest(transfer_ids=transfer_ids, until=self.until, wait_for=wait_for)
        return await self._asked(self.stub.WaitTransfers, request)

    async def _asked(self, method: "aio.UnaryUnaryMultiCallable[Asked, Answered]", request: Asked) -> Answered:
        """The last answer before the time is over. Raises what the server refuses the wait with; Unavailable only when
        it could not be reached to the end.
        """
        until, pause_s = time.monotonic() + self.timeout_s, PAUSE_FIRST_S
        while True:
            left_s = max(until - time.monotonic(), 0.001)  # zero would mean the server's own maximum
            once_s = min(left_s, ONE_WAIT_S)
            request.timeout.CopyFrom(duration(once_s))
            try:
                reply = await self.caller.read(method, request, {"timeout_s": once_s + ANSWER_S})
            except Unavailable as error:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise
                await asyncio.sleep(min(max(pause_s, error.retry_delay_s or 0.0), left_s))
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
                continue
            pause_s = PAUSE_FIRST_S
            if reply.condition_met or time.monotonic() >= until:
                return reply


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
