"""Moves the KV of a prompt from one server to another in one call, and defines the error of a failed transfer."""

import secrets
import time
from dataclasses import dataclass

from kvgrpc.client.cleaning import CleanUp, clean_up
from kvgrpc.client.client import Client
from kvgrpc.client.transfers import WAIT_S
from kvgrpc.client.values import AnyBlocks, Tokens, as_blocks, block_ids, is_over, name_of, reason_of
from kvgrpc.errors import Aborted, NextStep, Reason
from kvgrpc.v1 import common_pb2
from kvgrpc.v1.common_pb2 import Blocks, TransferPhase
from kvgrpc.v1.transfer_pb2 import TRANSFER_STATE_SUCCEEDED, Transfer


class TransferFailed(Aborted):
    """Raised when a transfer has ended without its KV: it failed or was cancelled. `reason` and `next` are its
    failure's.
    """

    def __init__(self, transfer: Transfer) -> None:
        failure = transfer.failure
        super().__init__(
            reason_of(failure.reason) if failure.reason else Reason.CANCELLED,
            failure.message or "the transfer has ended without its KV",
            metadata={"transfer_id": transfer.transfer_id, "phase": name_of(TransferPhase, failure.phase)},
        )
        self.transfer = transfer
        step = name_of(common_pb2.NextStep, failure.next).upper()
        known = failure.reason in common_pb2.FailureReason.values() and step in NextStep.__members__
        self.next = NextStep[step] if known else None


def check_transfer(transfer: Transfer) -> Transfer:
    """Returns the transfer if it has succeeded or is not over. Raises TransferFailed if it has ended in another way.

    For a server such an end is no error of a call: calls that wait for a transfer return it however it ended.
    """
    if is_over(transfer) and transfer.state != TRANSFER_STATE_SUCCEEDED:
        raise TransferFailed(transfer)
    return transfer


@dataclass(frozen=True)
class Moved:
    """Result of a move: where the KV is now."""

    transfer: Transfer
    """The RECEIVE transfer at the destination."""
    blocks: Blocks
    """Blocks at the destination. Those that the move allocated are freed with `free`."""


async def move(  # noqa: PLR0913 - by name, each with a default
    source: Client,
    destination: Client,
    blocks: AnyBlocks,
    content: Tokens,
    *,
    into: AnyBlocks | None = None,
    request_id: str = "",
    timeout_s: float = WAIT_S,
) -> Moved:
    """Copies the KV of a prompt from blocks of one server to another, and waits until it is there. The move allocates
    as many blocks at the destination unless `into` names some, hands over the source's blocks, and pulls. Both servers
    manage their pools; the caller still owns the source's blocks.

    A move that fails leaves nothing behind: it is cancelled at both sides, and what it allocated is freed. Raises the
    error of a refused call, TransferFailed, or DeadlineExceeded.
    """
    until, key, given = time.monotonic() + timeout_s, secrets.token_bytes(16), as_blocks(blocks)
    allocated = ""
    if into is None:
        counts = {row.group: len(block_ids(row)) for row in given.groups}
        taken = await destination.allocate(counts, request_id=request_id, label="move")
        into, allocated = taken.blocks, taken.blocks.allocation_id
    target = as_blocks(into)
    try:
        handed_over = await source.finished_blocks(
            given, content, transfer_key=key, request_id=request_id, ttl_s=timeout_s
        )
        left_s = max(until - time.monotonic(), 0.001)
        pulled = await destination.pull(
            handed_over.grant, content, blocks=target, request_id=request_id, timeout_s=left_s
        )
        return Moved(check_transfer(pulled), target)
    except BaseException:
        sides = (CleanUp(source, key), CleanUp(destination, key, [allocated] if allocated else []))
        await clean_up(sides, message="the move failed")
        raise
