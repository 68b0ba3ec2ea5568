"""One call that moves the KV of a prompt from one server to another, and the error of a transfer that failed."""

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
    """A transfer has ended without its KV: it failed or was cancelled. `reason` and `next` are those of its failure."""

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
    """The transfer, which has succeeded or is not over. Raises TransferFailed where it has ended in another way.

    To a server such an end is no error of a call: what waits for a transfer gives it however it ended.
    """
    if is_over(transfer) and transfer.state != TRANSFER_STATE_SUCCEEDED:
        raise TransferFailed(transfer)
    return transfer


@dataclass(frozen=True)
class Moved:
    """Where the KV is now."""

    transfer: Transfer
    """The RECEIVE at the destination."""
    blocks: Blocks
    """Those of the destination; what was allocated for the move is freed by `free`."""


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
    """Copies the KV of a prompt from blocks of one server to another one, and waits until it is there: as many blocks
    are allocated at the destination, unless `into` names some, those of the source are handed over to be read, and the
    destination pulls. Both servers manage their pools; the source's blocks stay the caller's.

    A move that fails leaves nothing behind: it is cancelled at both sides, and what it allocated is freed. It raises
    what refuses a call, TransferFailed, or DeadlineExceeded.
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
