"""One storm: two routers send requests over eight leads, first quietly, then while leads are killed and added."""

import asyncio
import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from bench.fleet.child import ChildProcess
from bench.fleet.sight import FleetSight
from bench.fleet.site import fleet_server
from bench.fleet.storm.leads import LEADS_MAX, StormLeads
from kvgrpc.client import connect
from tests.registry.etcds import RunningEtcd

ROUTERS = 2
QUIET_SHARE = 0.25
"""Share of the time in which no lead is killed."""
COME_S = 60.0
LOOK_S = 0.2
ERRORS_MAX = 8
"""Maximum number of untyped errors in a result, of those that differ."""
HELD_S = 60.0
"""Time within which all blocks have to be free after the storm, in seconds: twice the life of what a router takes."""


@dataclass(frozen=True)
class StormSite:
    """All processes of a storm."""

    leads: StormLeads
    fleets: Sequence[str]
    """Addresses of the servers of the fleet, one for each router."""
    routers: Sequence[ChildProcess]


async def storm(folder: Path, seconds: float, seed: int, ttl_s: int) -> dict[str, Any]:
    """Returns the result of a quiet run and of a storm."""
    with _site(folder, seed, ttl_s) as site:
        await asyncio.to_thread(site.leads.begin)
        for address in site.fleets:
            await _all_healthy(address, site.leads)
        quiet = await _ends(site, seconds * QUIET_SHARE)
        busy = asyncio.create_task(_ends(site, seconds * (1 - QUIET_SHARE)))
        with contextlib.suppress(TimeoutError):
            await site.leads.storm(seconds * (1 - QUIET_SHARE))
        ends = await busy
        await asyncio.to_thread(site.leads.wait_ready)
        return _summary(ends) | {
            "kills": site.leads.kills,
            "added": site.leads.added,
            "held_blocks": await _held(site.leads.addresses),
            "quiet": _summary(quiet),
        }


@contextmanager
def _site(folder: Path, seed: int, ttl_s: int) -> Iterator[StormSite]:
    with ExitStack() as ends:
        etcd = RunningEtcd(folder / "etcd")
        ends.callback(etcd.end)
        etcd.start()
        leads = StormLeads(folder, etcd.address, ttl_s, seed)
        ends.callback(leads.end)
        registry, fleets, routers = f"etcd://{etcd.address}", list[str](), list[ChildProcess]()
        for number in range(ROUTERS):
            _, address = ends.enter_context(fleet_server(folder, registry, f"fleet-{number}"))
            job = {"fleet": address, "folder": str(leads.folder), "seed": seed * ROUTERS + number}
            routers.append(ChildProcess("storm.router", job))
            ends.callback(routers[-1].close)
            fleets.append(address)
        yield StormSite(leads, fleets, routers)


async def _all_healthy(address: str, leads: StormLeads) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        sight = FleetSight(channel)
        try:
            await sight.until(
                lambda: len(sight.healthy(leads.engine_ids)) == LEADS_MAX, COME_S, "all leads are healthy"
            )
        finally:
            await sight.close()


async def _ends(site: StormSite, seconds: float) -> list[dict[str, Any]]:
    """Returns how the requests of all routers ended."""
    told = await asyncio.gather(*(router.ask({"seconds": seconds}) for router in site.routers))
    return [end for one in told for end in one["ends"]]


async def _held(addresses: Sequence[str]) -> int:
    """Returns the number of blocks that living leads hold after the storm, once there are none or at the latest."""
    until = time.monotonic() + HELD_S
    async with contextlib.AsyncExitStack() as ends:
        clients = [await ends.enter_async_context(connect(address)) for address in addresses]
        while True:
            pools = [group for client in clients for group in (await client.pool_status()).groups]
            held = sum(group.block_count - group.free_block_count for group in pools)
            if not held or time.monotonic() > until:
                return held
            await asyncio.sleep(LOOK_S)


def _summary(ends: Sequence[dict[str, Any]]) -> dict[str, Any]:
    answers = [end for end in ends if end["right"] is not None]
    return {
        "requests": len(ends),
        "answers": len(answers),
        "wrong": sum(not end["right"] for end in answers),
        "untyped": sum(bool(end["untyped"]) for end in ends),
        "untyped_errors": sorted({end["untyped"] for end in ends if end["untyped"]})[:ERRORS_MAX],
        "typed": sum(end["right"] is None and not end["untyped"] for end in ends),
        "tries_failed": dict(Counter(reason for end in ends for reason in end["typed"])),
        "median_s": round(statistics.median(end["seconds"] for end in ends), 4),
        "slowest_s": round(max(end["seconds"] for end in ends), 4),
    }
