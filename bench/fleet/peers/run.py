"""One run: a lead meets many peers, another one meets one of them. Both rest, and pull from that peer in turn."""

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
from kvgrpc.errors import Exhausted
from tests.service.engines import ServeProcess

PROCESSES = 4
"""Number of processes that the peers are in."""
AT_ONCE = 8
"""Number of handshakes at a time."""
ROUNDS, PULLS = 6, 20
BLOCKS = 16


async def many_peers(folder: Path, count: int, rest_s: float) -> dict[str, Any]:
    """Returns the figures of a lead that meets so many peers, beside a lead that meets one of them."""
    with ExitStack() as ends:
        one, many = (_lead(folder / name, ends) for name in ("one", "many"))
        share = -(-count // PROCESSES)
        children = [
            ChildProcess("peers.leads", {"first": first, "count": min(share, count - first)})
            for first in range(0, count, share)
        ]
        for child in children:
            ends.callback(child.close)
        peers = [peer for child in children for peer in child.said["addresses"]]
        async with (
            connect(one.wait_ready()["address"]) as alone,
            connect(many.wait_ready()["address"]) as among,
            connect(peers[0]) as source,
        ):
            await _meet(alone, peers[:1])
            await _meet(among, peers[:1])
            before = resident_bytes(many.pid)
            took = await _meet(among, peers[1:])
            grown = resident_bytes(many.pid) - before
            idle = {name: await _idle(lead.pid, rest_s) for name, lead in (("one_peer", one), ("all_peers", many))}
            pulls = {"one_peer": Pulls(one.pid, alone, source), "all_peers": Pulls(many.pid, among, source)}
            for _ in range(ROUNDS):
                for each in pulls.values():
                    await each.pull()
            known = len((await among.peers()).peers)
        return {
            "peers": known,
            "handshake_s": {"median": statistics.median(took), "max": max(took)},
            "bytes_per_peer": round(grown / len(took)),
            "idle_core_percent": {name: round(100 * share_of, 2) for name, share_of in idle.items()},
            "pull_ms": {name: round(statistics.median(each.times_ms), 3) for name, each in pulls.items()},
            "pull_processor_ms": {name: round(each.spent_s(idle[name]) * 1e3, 3) for name, each in pulls.items()},
        }


def _lead(folder: Path, ends: ExitStack) -> ServeProcess:
    lead = ServeProcess(folder, "--listen", "127.0.0.1:0", "--data-paths", "shm", *FLAGS)
    ends.callback(lead.end)
    return lead


class Pulls:
    """The pulls of one lead from one peer, in rounds of one after the other."""

    def __init__(self, pid: int, client: Client, source: Client) -> None:
        self._pid, self._client, self._source = pid, client, source
        self.times_ms = list[float]()
        self._rounds = list[tuple[float, float]]()
        """Processor time of a pull, and time by the clock, in seconds."""

    async def pull(self) -> None:
        """Makes a round."""
        tokens = list(range(BLOCKS * 16))
        mine, theirs = await self._client.allocate(BLOCKS), await self._source.allocate(BLOCKS)
        offered = await self._source.finished_blocks(theirs, tokens, consumers=2, ttl_s=60.0)
        spent, began = processor_s(self._pid), time.monotonic()
        for _ in range(PULLS):
            sent = time.perf_counter()
            check_transfer(await self._client.pull(offered.grant, tokens, blocks=mine, returned=True))
            self.times_ms.append((time.perf_counter() - sent) * 1e3)
        self._rounds.append(((processor_s(self._pid) - spent) / PULLS, (time.monotonic() - began) / PULLS))
        await self._source.release_lease(offered.lease.lease_id)  # one consumer counts once, however often it pulls
        for each, blocks in ((self._client, mine), (self._source, theirs)):
            await each.free(blocks)

    def spent_s(self, idle: float) -> float:
        """Returns the median over rounds of a pull's processor time at the lead, in seconds, without what the lead
        takes anyway.
        """
        return statistics.median(spent - idle * took for spent, took in self._rounds)


async def _meet(client: Client, peers: Sequence[str]) -> list[float]:
    """Shakes hands with peers, some at a time and no more than a lead lets one caller cause. Returns how long each
    took, in seconds.
    """
    places, took = asyncio.Semaphore(AT_ONCE), list[float]()

    async def meet(address: str) -> None:
        async with places:
            while True:
                began = time.monotonic()
                try:
                    await client.connect_peer(address, timeout_s=60.0)
                except Exhausted as error:
                    await asyncio.sleep(error.retry_delay_s or 1.0)
                else:
                    took.append(round(time.monotonic() - began, 4))
                    return

    await asyncio.gather(*map(meet, peers))
    return took


async def _idle(pid: int, rest_s: float) -> float:
    """Returns the share of a core that a lead takes while nothing is asked of it."""
    spent, began = processor_s(pid), time.monotonic()
    await asyncio.sleep(rest_s)
    return (processor_s(pid) - spent) / (time.monotonic() - began)
