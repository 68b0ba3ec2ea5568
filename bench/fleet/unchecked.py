"""A process that reads the registry as `kvgrpc fleet` does, and calls no lead: each check is answered at once. It also
times the choice of pairs alone, by its processor time.
"""

import asyncio
import time
from functools import partial
from typing import Any

import grpc.aio

from bench.fleet.child import Answerer, answer_lines
from bench.fleet.engines import MODEL
from kvgrpc.config_fleet import FleetConfig
from kvgrpc.fleet.directory import Directory, HealthCheck, LeadAnswer
from kvgrpc.fleet.pairing import PairRequest, PickedPair
from kvgrpc.service.fleet.lead_checks import LeadChecks
from kvgrpc.service.fleet.reader import FleetReading
from kvgrpc.service.heap import calm_collector


class AnsweredChecks(LeadChecks):
    """Checks that all succeed without a call."""

    async def ask(self, directory: Directory, check: HealthCheck) -> bool:
        directory.heard(check, LeadAnswer(), asyncio.get_running_loop().time())
        return True


async def begin(job: dict[str, Any]) -> tuple[dict[str, Any], Answerer]:
    """Reads, until the process ends."""
    checks = AnsweredChecks(lambda address, _: grpc.aio.insecure_channel(address), lambda _: True)
    reading = FleetReading(FleetConfig(job["registry"]), checks)
    await reading.listed.wait()
    calm_collector()
    return {}, partial(_pick, reading)


async def _pick(reading: FleetReading, request: dict[str, Any]) -> dict[str, Any]:
    """Picks as often as a line says. Says the processor time of each pick, in milliseconds."""
    spent, now = list[float](), asyncio.get_running_loop().time
    for _ in range(request["picks"]):
        began = time.thread_time()
        found = reading.picker.pick_pair(PairRequest(model_name=MODEL), now())
        spent.append((time.thread_time() - began) * 1e3)
        assert isinstance(found, PickedPair)
        await asyncio.sleep(0)
    return {"processor_ms": spent}


if __name__ == "__main__":
    answer_lines(begin)
