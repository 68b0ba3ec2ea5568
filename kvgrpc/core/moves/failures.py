"""Failures of moves: for each reason, the side at fault and the next step."""

from kvgrpc.core.actions import Operation
from kvgrpc.core.state.move import Move
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import Failure, Side
from kvgrpc.errors import NextStep, Reason

NEXT_STEPS: dict[Reason, NextStep] = {
    Reason.CONTENT_MISMATCH: NextStep.FIX_REQUEST,
    Reason.CONTENT_RANGE: NextStep.FIX_REQUEST,
    Reason.CONTENT_REQUIRED: NextStep.FIX_REQUEST,
    Reason.GRANT_INVALID: NextStep.FIX_REQUEST,
    Reason.GRANT_FOREIGN: NextStep.FIX_REQUEST,
    Reason.GRANT_WRONG_ACCESS: NextStep.FIX_REQUEST,
    Reason.ACCESS_REUSED: NextStep.FIX_REQUEST,
    Reason.DIAL_REFUSED: NextStep.FIX_REQUEST,
    Reason.INCOMPATIBLE_POOLS: NextStep.RETRY_OTHER_CONSUMER,
    Reason.PROTOCOL_UNSUPPORTED: NextStep.RETRY_OTHER_CONSUMER,
    Reason.NO_DATA_PATH: NextStep.RETRY_OTHER_CONSUMER,
    Reason.PEER_UNREACHABLE: NextStep.RETRY_OTHER_CONSUMER,
    Reason.QUEUE_TIMEOUT: NextStep.RETRY_HERE,
    Reason.TRANSFER_TIMEOUT: NextStep.RETRY_HERE,
    Reason.SETTLE_TIMEOUT: NextStep.RETRY_HERE,
    Reason.DATA_PATH_FAILED: NextStep.RETRY_HERE,
    Reason.CHECKSUM_MISMATCH: NextStep.RETRY_HERE,
    Reason.DEADLINE: NextStep.RETRY_HERE,
}
"""Next step after a failed move, by reason; RECOMPUTE for other reasons. RETRY_HERE holds for pulls only."""

LOST_SOURCE = frozenset(
    {
        Reason.LEASE_EXPIRED,
        Reason.LEASE_RELEASED,
        Reason.LEASE_VOIDED,
        Reason.LEASE_RECLAIMED,
        Reason.LEASE_NOT_FOUND,
        Reason.INCARNATION_CHANGED,
        Reason.CANCELLED,
    }
)
"""Answers to a renewal that mean the blocks are gone."""

TIMEOUTS = {
    Timer.REGISTRATION: (Reason.REGISTRATION_TIMEOUT, "the other side of the push did not come, or not with all parts"),
    Timer.BLOCKS: (Reason.QUEUE_TIMEOUT, "no blocks were given for it within the cap of its lease"),
    Timer.QUEUE: (Reason.QUEUE_TIMEOUT, "it waited too long in phase {phase}"),
    Timer.TRANSFER: (Reason.TRANSFER_TIMEOUT, "the bytes took longer than the transfer timeout"),
    Timer.SETTLE: (Reason.SETTLE_TIMEOUT, "the other side did not say in time whether the bytes are valid"),
}

OWN_FAILURES = frozenset(
    {Reason.QUEUE_TIMEOUT, Reason.TRANSFER_TIMEOUT, Reason.DATA_PATH_FAILED, Reason.DIAL_REFUSED, Reason.NO_DATA_PATH}
)
"""Reasons that lie at the side that moves the bytes."""


def move_failure(move: Move, reason: Reason, message: str, rank: int | None = None) -> Failure:
    """Returns the failure of a move in its present stage."""
    reads = move.operation is Operation.READ
    side = Side.DESTINATION if (reason in OWN_FAILURES) is reads else Side.SOURCE
    step = NEXT_STEPS.get(reason, NextStep.RECOMPUTE)
    if step is NextStep.RETRY_HERE and not move.retried_here:
        step = NextStep.RECOMPUTE
    return Failure(reason, message, move.stage.value, side, rank, step)
