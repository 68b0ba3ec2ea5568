"""One run: a fleet begins, rests, restarts, drains and loses processes, and its readers are watched meanwhile."""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc.aio

from bench.fleet.child import processor_s, resident_bytes
from bench.fleet.engines import MODEL
from bench.fleet.sight import FleetSight
from bench.fleet.site import FleetSite, fleet_site
from kvgrpc.v1 import fleet_pb2, fleet_pb2_grpc

COME_S = 120.0
"""Time within which whatever is waited for has to come, in seconds."""
DRAINS = 50
"""Maximum number of engines that drain, one after the other."""
HEALTHY, DRAINING = fleet_pb2.ENGINE_STATE_HEALTHY, fleet_pb2.ENGINE_STATE_DRAINING


def say(text: str) -> None:
    """Tells whoever waits how far the run is."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the result of a run."""
    with (
        TemporaryDirectory(prefix="kvgrpc-fleet-") as folder,
        fleet_site(Path(folder), options.engines, options.ttl_s, options.publishers) as site,
    ):
        async with grpc.aio.insecure_channel(site.fleet_address) as channel:
            sight = FleetSight(channel)
            try:
                return await FleetRun(site, sight, options).result(fleet_pb2_grpc.FleetServiceStub(channel))
            finally:
                await sight.close()


@dataclass(frozen=True)
class FleetRun:
    """The steps of a run."""

    site: FleetSite
    sight: FleetSight
    options: argparse.Namespace

    async def result(self, stub: "fleet_pb2_grpc.FleetServiceAsyncStub") -> dict[str, Any]:
        """Takes all steps in order."""
        engines, doomed = [one.engine_id for one in self.site.engines], self.site.doomed
        found: dict[str, Any] = {"ttl_s": self.options.ttl_s}
        say(f"{len(engines)} engines begin")
        before = await self._resident()
        await self._restart_all(self.options.restart_s)
        await self.site.router.ask({"engines": len(engines)})
        await asyncio.sleep(self.options.rest_s)
        after = await self._resident()
        found["bytes_per_engine"] = {name: round((after[name] - before[name]) / len(engines)) for name in after}
        say("the fleet rests")
        resting, _ = await self._spent(asyncio.sleep(self.options.rest_s))
        say("pairs are picked")
        found["pick_ms_p99"], found["pick_ms_median"] = await self._picks(stub)
        say("engines drain")
        found["drain_seen_s"] = _summary(await self._drains(engines[doomed:-doomed][:DRAINS]))
        say("all engines restart")
        restarting, lives = await self._spent(self._restart_all(self.options.restart_s))
        found["registered_s"] = _summary([took for _, _, _, took in lives])
        found["healthy_s"] = _summary(
            [self.sight.seen_at[name, life, HEALTHY] - begun for name, life, begun, _ in lives]
        )
        found["watch_core_percent"] = {name: resting[name] for name in ("with_checks", "without_checks")} | {
            f"{name}_at_restart": restarting[name] for name in ("with_checks", "without_checks")
        }
        found["etcd_core_percent"] = {"resting": resting["etcd"], "at_restart": restarting["etcd"]}
        say("a process that answers is killed")
        found["failed_after_death_s"] = await self._until_gone(self.site.answerers[0].kill, engines[:doomed])
        say("a process that publishes is killed")
        found["evicted_after_kill_s"] = await self._until_gone(self.site.publishers[-1].kill, engines[-doomed:])
        return found

    async def _restart_all(self, seconds: float) -> list[tuple[str, int, float, float]]:
        """Begins a life of each engine, until the readers show all of them as healthy."""
        request = {"do": "restart", "seconds": seconds}
        told = await asyncio.gather(*(publisher.ask(request) for publisher in self.site.publishers))
        lives = [(str(name), int(life), begun, took) for one in told for name, life, begun, took in one["lives"]]
        left = {(name, life, HEALTHY) for name, life, _, _ in lives}
        await self.sight.until(lambda: left <= self.sight.seen_at.keys(), COME_S, "all engines are healthy")
        return lives

    async def _resident(self) -> dict[str, int]:
        return {name: resident_bytes(pid) for name, pid in self.site.readers.items()}

    async def _spent(self, work: Any) -> tuple[dict[str, float], Any]:
        """Returns the share of a core that each process took during some work, in percent, and the work's result."""
        pids = self.site.readers | {"etcd": self.site.etcd.pid}
        before, begun = {name: processor_s(pid) for name, pid in pids.items()}, time.monotonic()
        done = await work
        took = time.monotonic() - begun
        return {name: round(100 * (processor_s(pid) - before[name]) / took, 2) for name, pid in pids.items()}, done

    async def _picks(self, stub: "fleet_pb2_grpc.FleetServiceAsyncStub") -> tuple[dict[str, float], dict[str, float]]:
        """Returns the 99th percentile and the median of one pick after the other, in milliseconds: of PickPair by the
        clock, and of the choice alone by processor time.
        """
        clock = list[float]()
        for _ in range(self.options.picks):
            begun = time.perf_counter()
            reply = await stub.PickPair(fleet_pb2.PickPairRequest(model_name=MODEL))
            clock.append((time.perf_counter() - begun) * 1e3)
            if not reply.HasField("prefill"):
                raise RuntimeError(f"no pair: {reply.reason}")
        alone = await self.site.unchecked.ask({"picks": self.options.picks})
        both = {"clock": clock, "processor": list[float](alone["processor_ms"])}
        return (
            {name: round(_percentile(times, 99), 3) for name, times in both.items()},
            {name: round(statistics.median(times), 3) for name, times in both.items()},
        )

    async def _drains(self, engine_ids: Sequence[str]) -> list[float]:
        """Returns the times from each entry's change until the watch shows that the engine drains, in seconds."""
        publishers = self.site.publishers[:-1]
        present = {one.engine_id: one.life for one in self.sight.engines.values()}
        numbers = {one.engine_id: one.number for one in self.site.engines}
        found = []
        for engine_id in engine_ids:
            publisher = publishers[numbers[engine_id] % len(publishers)]
            began = await publisher.ask({"do": "drain", "engine_id": engine_id, "draining": True})
            seen = (engine_id, present[engine_id], DRAINING)
            await self.sight.until(lambda: seen in self.sight.seen_at, COME_S, "a drain is seen")  # noqa: B023 - now
            found.append(self.sight.seen_at[seen] - began["at"])
            await publisher.ask({"do": "drain", "engine_id": engine_id, "draining": False})
        return found

    async def _until_gone(self, kill: Any, engine_ids: Sequence[str]) -> dict[str, float]:
        """Returns the times from a kill until the first and the last of some engines are not healthy any more."""
        begun = time.monotonic()
        kill()
        many = len(engine_ids)
        first = await self.sight.until(
            lambda: len(self.sight.healthy(engine_ids)) < many, COME_S, "a dead engine is out of use"
        )
        last = await self.sight.until(lambda: not self.sight.healthy(engine_ids), COME_S, "dead engines are out of use")
        return {"first": round(first - begun, 3), "last": round(last - begun, 3)}


def _summary(times: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(times), 4),
        "p99": round(_percentile(times, 99), 4),
        "max": round(max(times), 4),
    }


def _percentile(values: Sequence[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]
