"""Drives a pull between two servers that manage their own blocks.

    kvgrpc serve --port 50051 --engine-id P
    kvgrpc serve --port 50052 --engine-id D
    python clients/python/router.py --prefill 127.0.0.1:50051 --decode 127.0.0.1:50052 --tokens 100

The router takes the place of both engines: it takes blocks at both servers, hands over those of the prefill engine,
relays the grant to the decode engine, and watches the transfer to its end. Whatever goes wrong, it cleans up at both
servers: one call to each ends the request's transfers there and frees its blocks. For engines that move the KV by
themselves, see the router in examples/router.
"""

import argparse
import asyncio
import secrets
import sys
from dataclasses import dataclass, field

from kvgrpc.client import CleanUp, Client, clean_up, connect, content, is_over
from kvgrpc.errors import KVGrpcError
from kvgrpc.v1.common_pb2 import FailureReason, NextStep
from kvgrpc.v1.pool_pb2 import AllocateBlocksResponse
from kvgrpc.v1.transfer_pb2 import TRANSFER_STATE_SUCCEEDED, Transfer, TransferState, WatchTransfersResponse

TIMEOUT_S = 60.0
BLOCKS_TTL_S = 120.0
"""Seconds after which the blocks of a router that dies are freed."""


@dataclass
class Request:
    """One LLM request on its way through both engines."""

    prefill: Client
    decode: Client
    token_ids: list[int]
    request_id: str = field(default_factory=lambda: f"req-{secrets.token_hex(4)}")
    transfer_key: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    """Key that pairs the two sides. Whoever knows it can cancel both."""
    allocations: dict[Client, list[str]] = field(default_factory=dict)

    async def run(self) -> Transfer:
        """Moves the KV, and returns the transfer as it ended."""
        wanted = content(self.token_ids)
        key, label = self.transfer_key, self.request_id
        source = await self._allocate(self.prefill)
        # Here the prefill engine computes the prompt into the blocks.
        offered = await self.prefill.finished_blocks(source, wanted, transfer_key=key, request_id=label)
        target = await self._allocate(self.decode)
        pull = await self.decode.pull_blocks(offered.grant, wanted, blocks=target, transfer_key=key, request_id=label)
        transfer = pull.transfer
        # The watch starts at the pull's own reply, so that it misses no change.
        async for event in self.decode.watch(after=pull, transfer_ids=[transfer.transfer_id]):
            if not isinstance(event, WatchTransfersResponse):
                # Changes are missing, or the engine has restarted: get the transfer.
                transfer = (await self.decode.get_transfer(transfer.transfer_id)).transfer
            else:
                transfer = event.transfer
            print(f"{self.request_id}: {TransferState.Name(transfer.state)}, {transfer.moved_bytes} bytes")
            if is_over(transfer):
                break
        return transfer

    async def clean_up(self, message: str) -> None:
        """Ends at both servers what is still under this key, and frees the blocks there."""
        sides = [
            CleanUp(client, self.transfer_key, free_allocation_ids=self.allocations.get(client, []))
            for client in (self.prefill, self.decode)
        ]
        for said in await clean_up(sides, message=message):
            if isinstance(said, KVGrpcError):
                print(f"{self.request_id}: could not be cleaned up: {said}", file=sys.stderr)

    async def _allocate(self, client: Client) -> AllocateBlocksResponse:
        """Allocates as many blocks of each group as the prompt needs."""
        (pool,) = (await client.describe_pools()).pools
        counts = {index: -(-len(self.token_ids) // group.block_tokens) for index, group in enumerate(pool.groups)}
        reply = await client.allocate(counts, ttl_s=BLOCKS_TTL_S)
        self.allocations.setdefault(client, []).append(reply.blocks.allocation_id)
        return reply


async def main() -> int:
    """Moves one prompt. Returns 0 when its KV is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", default="127.0.0.1:50051", help="server of the prefill engine")
    parser.add_argument("--decode", default="127.0.0.1:50052", help="server of the decode engine")
    parser.add_argument("--tokens", type=int, default=100, help="length of the prompt")
    options = parser.parse_args()
    async with connect(options.prefill) as prefill, connect(options.decode) as decode:
        request = Request(prefill, decode, list(range(options.tokens)))
        why = "the request is over"
        try:
            async with asyncio.timeout(TIMEOUT_S):
                transfer = await request.run()
        except (KVGrpcError, TimeoutError) as error:
            why = str(error) or "it took too long"
            print(f"{request.request_id}: {why}", file=sys.stderr)
            return 1
        finally:
            await asyncio.shield(request.clean_up(why))
    if transfer.state == TRANSFER_STATE_SUCCEEDED:
        print(f"{request.request_id}: {transfer.block_count} blocks, {transfer.moved_bytes} bytes")
        return 0
    failure = transfer.failure
    what = f"{FailureReason.Name(failure.reason)}: {failure.message} ({NextStep.Name(failure.next)})"
    print(f"{request.request_id}: {what}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
