"""What a lead answers when it refuses, as errors: a session carries reason and sentence; the class follows here."""

from kvgrpc.errors import (
    AlreadyExists,
    Exhausted,
    InvalidRequest,
    KVGrpcError,
    NotFound,
    OutOfRange,
    PermissionDenied,
    PreconditionFailed,
    Reason,
    Unavailable,
    Unimplemented,
)
from kvgrpc.wire.values import core_reason


class LeadDied(Unavailable):
    """The session ended without being asked to: the lead or a worker is gone, and every lease and transfer with it.

    No event follows. See `Engine` for what becomes of the memory.
    """


_CLASSES: dict[Reason, type[KVGrpcError]] = {
    Reason.INVALID_FIELD: InvalidRequest,
    Reason.GROUP_MISMATCH: InvalidRequest,
    Reason.BLOCK_DUPLICATE: InvalidRequest,
    Reason.BLOCK_OUT_OF_RANGE: OutOfRange,
    Reason.LIMIT_EXCEEDED: OutOfRange,
    Reason.ENGINE_ATTACHED: AlreadyExists,
    Reason.NOT_OWNER: PermissionDenied,
    Reason.POOL_EXHAUSTED: Exhausted,
    Reason.QUEUE_FULL: Exhausted,
    Reason.NO_POOL: NotFound,
    Reason.DRAINING: Unavailable,
    Reason.FEATURE_UNAVAILABLE: Unimplemented,
}
"""Everything else is PreconditionFailed."""


def refusal(reason: int, message: str) -> KVGrpcError:
    """The error of a refusal."""
    known = core_reason(reason)
    return _CLASSES.get(known, PreconditionFailed)(known, message)
