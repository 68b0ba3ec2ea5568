"""Drives two servers by `kvgrpc.client` alone, in whatever version Python finds: a pull, a push, a lease.

It prints where the package is, and how each of the three ended.
"""

import asyncio
import json
import secrets
import sys
from typing import Any

import kvgrpc
from kvgrpc.client import Client, connect, name_of
from kvgrpc.v1.lease_pb2 import LeaseState
from kvgrpc.v1.transfer_pb2 import TransferState

TOKENS = list(range(100))
BLOCKS = 7


async def pull(source: Client, destination: Client) -> str:
    """Hands blocks over and pulls them. Returns the end."""
    given = await source.finished_blocks(await source.allocate(BLOCKS), TOKENS)
    target = await destination.allocate(BLOCKS)
    end = await destination.pull(given.grant, TOKENS, blocks=target, returned=True)
    return name_of(TransferState, end.state)


async def push(source: Client, destination: Client) -> str:
    """Reserves blocks and pushes into them. Returns the end."""
    key = secrets.token_bytes(16)
    reserved = await destination.reserve_blocks(key, await destination.allocate(BLOCKS), TOKENS)
    await source.register_push(reserved.grant)
    await source.push_part(key, await source.allocate(BLOCKS), TOKENS, last=True)
    end = await destination.wait(reserved.transfer.transfer_id, returned=True)
    return name_of(TransferState, end.state)


async def lease(source: Client) -> list[str]:
    """Grants, renews and releases a lease. Returns its states."""
    granted = await source.grant_lease(await source.allocate(BLOCKS), TOKENS)
    (renewed,) = (await source.renew_leases([granted.grant])).leases
    released = await source.release_lease(granted.lease.lease_id)
    found = await source.get_lease(granted.lease.lease_id)
    states = granted.lease.state, renewed.state, released.lease.state, found.lease.state
    return [name_of(LeaseState, state) for state in states]


async def main() -> dict[str, Any]:
    async with connect(sys.argv[1]) as source, connect(sys.argv[2]) as destination:
        return {
            "package": kvgrpc.__file__,
            "pull": await pull(source, destination),
            "push": await push(source, destination),
            "lease": await lease(source),
        }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main())))
