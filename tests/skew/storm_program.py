"""Moves blocks between two servers with `kvgrpc.client`, in whatever version Python finds, until a file exists.

    python storm_program.py ADDRESS ADDRESS FILE            # both servers, and the file that ends the program
    python storm_program.py ADDRESS ADDRESS FILE --plant    # one byte of what arrives is changed before the comparison

It prints how many moves ended in each way. A move is "wrong" if other bytes are at its target than at its source, and
else "right", or "blind" if the bytes cannot show that they were moved: an unfilled block is zero, and a target may hold
the bytes already. Other moves are counted by their typed reason, or are "untyped".
"""

import asyncio
import json
import secrets
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from kvgrpc.client import Client, connect, name_of
from kvgrpc.errors import KVGrpcError
from kvgrpc.v1.common_pb2 import FailureReason
from kvgrpc.v1.pool_pb2 import AllocateBlocksResponse
from kvgrpc.v1.transfer_pb2 import TRANSFER_STATE_SUCCEEDED, Transfer

TOKENS = list(range(48))
BLOCKS = 3
MOVE_S = 10.0
"""Timeout of a move, in seconds."""
FREE_S = 1.0
"""Timeout of giving blocks back, in seconds."""
PAUSE_S = 0.02
"""Pause after a move, in seconds."""
UNTYPED = ("", "UNSPECIFIED", "INTERNAL", "INTERNAL_DEFECT")


async def bytes_of(client: Client, blocks: AllocateBlocksResponse) -> list[bytes]:
    return [row.data for row in (await client.read_blocks(blocks)).blocks]


def flipped(rows: list[bytes]) -> list[bytes]:
    """Returns rows with another last byte in the last row."""
    return [*rows[:-1], rows[-1][:-1] + bytes([rows[-1][-1] ^ 1])]


def compared(sent: list[bytes], there: list[bytes], received: list[bytes]) -> str:
    """Compares what was sent with what arrived, where `there` is what the targets held before."""
    if received != sent:
        return "wrong"
    return "blind" if any(not any(row) or row == before for row, before in zip(sent, there, strict=True)) else "right"


def reasoned(reason: str) -> str:
    """Returns the key of a move that did not succeed. INTERNAL is what an error without details is read as."""
    return "untyped" if reason in UNTYPED else f"refused {reason}"


@asynccontextmanager
async def borrowed(client: Client) -> AsyncIterator[AllocateBlocksResponse]:
    """Yields blocks, which are free again after the context and the moves that use them."""
    blocks = await client.allocate(BLOCKS, ttl_s=MOVE_S)
    try:
        yield blocks
    finally:
        with suppress(KVGrpcError):  # the lead is away, and its next life has no such blocks
            await client.free(blocks, timeout_s=FREE_S)


async def move(source: Client, destination: Client, pulled: bool, planted: bool) -> str:
    """Moves blocks once. Returns the key under which the move is counted."""
    async with borrowed(source) as given, borrowed(destination) as taken:
        sent, there = await bytes_of(source, given), await bytes_of(destination, taken)
        end: Transfer
        if pulled:
            grant = (await source.finished_blocks(given, TOKENS)).grant
            end = await destination.pull(grant, TOKENS, blocks=taken, timeout_s=MOVE_S)
        else:
            key = secrets.token_bytes(16)
            reserved = await destination.reserve_blocks(key, taken, TOKENS)
            await source.register_push(reserved.grant)
            await source.push_part(key, given, TOKENS, last=True)
            end = await destination.wait(reserved.transfer.transfer_id, timeout_s=MOVE_S)
        if end.state != TRANSFER_STATE_SUCCEEDED:
            return reasoned(name_of(FailureReason, end.failure.reason).upper())
        received = await bytes_of(destination, taken)
        return compared(sent, there, flipped(received) if planted else received)


async def main(one_address: str, other_address: str, end: str, *options: str) -> Counter[str]:
    seen: Counter[str] = Counter()
    async with connect(one_address) as one, connect(other_address) as other:
        for source, destination, pulled in _turns(one, other):
            try:
                seen[await move(source, destination, pulled, "--plant" in options)] += 1
            except KVGrpcError as error:
                seen[reasoned(error.reason)] += 1
            if await asyncio.to_thread(Path(end).exists):
                break
            await asyncio.sleep(PAUSE_S)
    return seen


def _turns(one: Client, other: Client) -> Iterator[tuple[Client, Client, bool]]:
    while True:
        for pulled in (True, False):
            yield one, other, pulled
            yield other, one, pulled


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main(*sys.argv[1:]))))
