"""Waiting for one transfer, longer than one WaitTransfer may take."""

import time
from typing import TYPE_CHECKING

from kvgrpc.client.calls import Caller, checked_timeout
from kvgrpc.client.values import duration, is_over, is_returned
from kvgrpc.errors import DeadlineExceeded, Reason
from kvgrpc.v1.transfer_pb2 import WAIT_CONDITION_ENDED, WAIT_CONDITION_RETURNED, Transfer, WaitTransferRequest

if TYPE_CHECKING:
    from kvgrpc.v1.transfer_pb2_grpc import TransferServiceAsyncStub

ONE_WAIT_S = 30.0
"""Of one call; half of what a server allows, so that proxies with a limit of a minute let it pass."""
ANSWER_S = 5.0
"""How long the answer may take after the server's own timer."""


async def wait(
    caller: Caller, stub: "TransferServiceAsyncStub", transfer_id: str, returned: bool, timeout_s: float
) -> Transfer:
    """The transfer once it is over (and, with `returned`, its memory is). Raises DeadlineExceeded with its phase."""
    until = time.monotonic() + checked_timeout(timeout_s)
    done = is_returned if returned else is_over
    condition = WAIT_CONDITION_RETURNED if returned else WAIT_CONDITION_ENDED
    while True:
        left_s = max(until - time.monotonic(), 0.001)  # zero would mean the server's own maximum
        once_s = min(left_s, ONE_WAIT_S)
        request = WaitTransferRequest(transfer_id=transfer_id, until=condition, timeout=duration(once_s))
        reply = await caller.read(stub.WaitTransfer, request, {"timeout_s": once_s + ANSWER_S})
        if done(reply.transfer):
            return reply.transfer
        if time.monotonic() >= until:
            raise _not_yet(reply.transfer, timeout_s)


def _not_yet(transfer: Transfer, timeout_s: float) -> DeadlineExceeded:
    if is_over(transfer):
        phase = "return"
    else:
        phase = transfer.waiting_for or (transfer.phases[-1].name if transfer.phases else "queue")
    return DeadlineExceeded(
        Reason.DEADLINE,
        f"transfer {transfer.transfer_id} is not done after {timeout_s:g} s; it is in its phase {phase}",
        metadata={"phase": phase, "transfer_id": transfer.transfer_id},
    )
