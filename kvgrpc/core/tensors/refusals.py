"""Refusals that several parts of the table make."""

from kvgrpc.core.tensors.descriptions import TensorId
from kvgrpc.core.tensors.waits import RETRY_DELAY_S
from kvgrpc.errors import AlreadyExists, Exhausted, OutOfRange, Reason

OF_PAIR = frozenset({Reason.NO_DATA_PATH, Reason.INCOMPATIBLE_POOLS})
"""Reasons for which two stores cannot exchange a tensor: another try between them ends the same way."""


def taken(id_: TensorId, why: str) -> AlreadyExists:
    """Returns the error for a name that another tensor has."""
    return AlreadyExists(Reason.TRANSFER_EXISTS, f"tensor {id_.name} part {id_.part} {why}")


def too_large(pages: int, most: int) -> OutOfRange:
    """Returns the error for a tensor that takes more pages than the store has."""
    what = f"the tensor takes {pages} pages; the store has {most}: put it in several parts"
    return OutOfRange(Reason.LIMIT_EXCEEDED, what, metadata={"limit": str(most)})


def full(what: str, limit: int) -> Exhausted:
    """Returns the error for a full table."""
    return Exhausted(Reason.LIMIT_EXCEEDED, what, retry_delay_s=RETRY_DELAY_S, metadata={"limit": str(limit)})
