"""One run: a lead meets one peer and pulls from it, then meets all others, rests, and pulls again."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.fleet.child import ChildProcess, processor_s, resident_bytes
from bench.fleet.peers.pools import FLAGS
from kvgrpc.client import Client, check_transfer, connect
from tests.service.engines import ServeProcess

PROCESSES = 4
"""Number of processes that the peers are in."""
AT_ONCE = 8
"""Number of handshakes at a time."""
PULLS = 300
BLOCKS = 16
REST_S = 20.0


async def many_peers(folder: Path, count: int) -> dict[str, Any]:
    """Returns the figures of one lead that meets so many peers."""
    with ExitStack() as ends:
        lead = ServeProcess(folder / "lead", "--listen", "127.0.0.1:0", "--data-paths", "shm", *FLAGS)
        ends.callback(lead.end)
        address = lead.wait_ready()["address"]
        share = -(-count // PROCESSES)
        children = [
            ChildProcess("peers.leads", {"first": first, "count": min(share, count - first)})
            for first in range(0, count, share)
        ]
        for child in children:
            ends.callback(child.close)
        peers = [peer for child in children for peer in child.said["addresses"]]
        async with connect(address) as client, connect(peers[0]) as first:
            one = await _meet(client, peers[:1])
            alone = await _pulls(lead.pid, client, first)
            before = resident_bytes(lead.pid)
            others = await _meet(client, peers[1:])
            grown = resident_bytes(lead.pid) - before
            idle = await _idle(lead.pid)
            among = await _pulls(lead.pid, client, first)
            known = len((await client.peers()).peers)
        return {
            "peers": known,
            "handshake_s": {"first": one[0], "median": statistics.median(others), "max": max(others)},
            "bytes_per_peer": round(grown / max(len(others), 1)),
            "idle_core_percent": round(100 * idle, 2),
            "pull_ms": {"one_peer": alone[0], "all_peers": among[0]},
            "pull_processor_ms": {"one_peer": alone[1], "all_peers": round(among[1] - 1e3 * idle * among[2], 3)},
        }


async def _meet(client: Client, peers: Sequence[str]) -> list[float]:
    """Shakes hands with peers, some at a time. Returns how long each took, in seconds."""
    places, took = asyncio.Semaphore(AT_ONCE), list[float]()

    async def meet(address: str) -> None:
        async with places:
            began = time.monotonic()
            await client.connect_peer(address, timeout_s=60.0)
            took.append(round(time.monotonic() - began, 4))

    await asyncio.gather(*map(meet, peers))
    return took


async def _pulls(pid: int, client: Client, source: Client) -> tuple[float, float, float]:
    """Returns the median time of a pull, its processor time at the lead, in milliseconds, and its time in seconds, all
    of one after the other.
    """
    tokens = list(range(BLOCKS * 16))
    mine, theirs = await client.allocate(BLOCKS), await source.allocate(BLOCKS)
    offered = await source.finished_blocks(theirs, tokens, consumers=PULLS, ttl_s=60.0)
    times, spent, began = list[float](), processor_s(pid), time.monotonic()
    for _ in range(PULLS):
        sent = time.perf_counter()
        check_transfer(await client.pull(offered.grant, tokens, blocks=mine, returned=True))
        times.append((time.perf_counter() - sent) * 1e3)
    took, used = time.monotonic() - began, processor_s(pid) - spent
    for each, blocks in ((client, mine), (source, theirs)):
        await each.free(blocks)
    return round(statistics.median(times), 3), round(used * 1e3 / PULLS, 3), took / PULLS


async def _idle(pid: int) -> float:
    """Returns the share of a core that a lead takes while nothing is asked of it."""
    spent, began = processor_s(pid), time.monotonic()
    await asyncio.sleep(REST_S)
    return (processor_s(pid) - spent) / (time.monotonic() - began)
