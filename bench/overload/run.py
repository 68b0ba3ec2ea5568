"""One run: what a lead serves at its limit, then rounds of quiet, of a flood of another lead, and of its own flood."""

import argparse
import asyncio
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.overload.kinds import Kind, prepare
from bench.overload.other import Others, Seen
from bench.overload.site import GREEDY, Generator, LeadPlace, Site, site
from tests.service.footprint import resident_bytes

GREEDY_BLOCKS = 64
IN_FLIGHT = 64
"""Number of calls in flight at which the rate is measured that a lead serves."""
SLOT_S = 0.1
WINDOW_SLOTS = 5
FULL = 0.9
"""Share of the later rate that counts as full speed."""
AFTER_S = 5.0
LATER_S = 5.0
"""Pause before the rate is measured again, in seconds. What a lead keeps of the flood, such as ended transfers, makes
lists dearer: the rate before the flood is no measure."""
LOOK_S = 0.05
FIRST_S = 1.0
"""Time from the beginning of a flood in which its first wave of streams holds up others, in seconds."""


@dataclass
class Flooded:
    """A phase with a flood."""

    outcome: dict[str, Any]
    first: Seen
    """What others began in the first `FIRST_S`."""
    later: Seen
    resident: list[int]

    @property
    def seen(self) -> Seen:
        """What others began in the whole flood."""
        return self.first + self.later


class OverloadRun:
    """One mode."""

    def __init__(self, options: argparse.Namespace, place: Site, others: Others, kinds: Sequence[Kind]) -> None:
        self._options, self._place, self._others, self._kinds = options, place, others, kinds

    async def rate(self, lead: LeadPlace, seconds: float) -> dict[str, Any]:
        """Returns what a lead serves with `IN_FLIGHT` calls in flight."""
        made = self._generator(lead, connections=self._options.connections, in_flight=IN_FLIGHT, seconds=seconds)
        made.begin()
        return await asyncio.to_thread(made.found)

    def _generator(self, lead: LeadPlace, **job: Any) -> Generator:
        return Generator(lead.address, self._kinds, self._place.tls, timeout_s=self._options.timeout_s, **job)

    async def flood(self, lead: LeadPlace, rate: float, seconds: float) -> Flooded:
        """Offers calls at a rate."""
        made = await asyncio.to_thread(
            lambda: self._generator(lead, connections=self._options.connections, rate=rate, seconds=seconds)
        )
        self._others.phase()
        resident: list[int] = []
        made.begin()
        first, first_until = Seen(), time.monotonic() + FIRST_S
        ended = asyncio.create_task(asyncio.to_thread(made.found))
        while not ended.done():
            resident.append(resident_bytes(lead.pid))
            await asyncio.wait([ended], timeout=LOOK_S)
            if time.monotonic() >= first_until:
                first, first_until = self._others.phase(), math.inf
        return Flooded(ended.result(), first, self._others.phase(), resident)

    async def quiet(self, seconds: float) -> Seen:
        """Lets only the others call."""
        self._others.phase()
        await asyncio.sleep(seconds)
        return self._others.phase()


def say(text: str) -> None:
    """Prints progress to stderr."""
    print(text, file=sys.stderr, flush=True)


async def run(options: argparse.Namespace, mode: str) -> dict[str, Any]:
    """Returns the figures of one mode."""
    with site(tls=mode == "identities", flags=options.flag) as place:
        async with Others(place).running() as others:
            credentials = place.credentials(GREEDY)
            source = place.source.address
            kinds = {
                lead.address: await prepare(source, lead.address, GREEDY_BLOCKS, credentials)
                for lead in (place.destination, place.unrelated)
            }
            here = OverloadRun(options, place, others, kinds[place.destination.address])
            there = OverloadRun(options, place, others, kinds[place.unrelated.address])
            await here.rate(place.destination, 1.0)
            served = await here.rate(place.destination, options.rate_s)
            limit = served["served"] / served["seconds"]
            say(f"{mode}: serves {limit:.0f} calls a second at its limit, {served['refused']}")
            rounds = []
            for number in range(options.rounds):
                rounds.append(await _round(options, place, here, there, limit * options.times))
                say(f"{mode}: round {number + 1}: {rounds[-1]}")
    return summary(limit, limit * options.times, rounds)


async def _round(
    options: argparse.Namespace, place: Site, here: OverloadRun, there: OverloadRun, rate: float
) -> dict[str, Any]:
    # A percentile is compared with one of as many samples.
    quiet = await here.quiet(options.quiet_s or options.seconds)
    control = await there.flood(place.unrelated, rate, options.control_s or options.seconds)
    await here.quiet(3.0)
    base = await here.rate(place.destination, 2.0)
    before = resident_bytes(place.destination.pid)
    flooded = await here.flood(place.destination, rate, options.seconds)
    began = time.monotonic()
    after = await here.rate(place.destination, AFTER_S)
    late = time.monotonic() - began - after["seconds"]
    await here.quiet(LATER_S)
    later = await here.rate(place.destination, 3.0)
    outcome = flooded.outcome
    full = full_speed_s(after["slots"], later["served"] / later["seconds"])
    seconds = outcome["seconds"]
    return {
        "offered_per_s": round(outcome["due"] / seconds, 1),
        "sent_per_s": round(outcome["sent"] / seconds, 1),
        "served_per_s": round(outcome["served"] / seconds, 1),
        "refused": outcome["refused"],
        "kept_back": outcome["kept_back"],
        "sent_back": outcome["sent_back"],
        "unanswered": outcome["unanswered"],
        "streams": outcome["streams"],
        "generator_processor_share": round(outcome["processor_s"] / seconds, 2),
        "resident_before": before,
        "resident_peak": max(flooded.resident),
        "resident_after": resident_bytes(place.destination.pid),
        "health_answers": len(flooded.seen.health),
        "health_not_serving": dict(flooded.seen.sick),
        "health_p99_s": percentile(flooded.seen.health, 99),
        "health_quiet_p99_s": percentile(quiet.health, 99),
        "others_failed": dict(flooded.seen.failed),
        **_times("quiet", quiet),
        **_times("control", control.seen),
        **_times("flooded", flooded.seen),
        "control_served_per_s": round(control.outcome["served"] / control.outcome["seconds"], 1),
        "ratio_p99_quiet": _ratio(flooded.seen.pulls, quiet.pulls),
        "ratio_p99_control": _ratio(flooded.seen.pulls, control.seen.pulls),
        "ratio_unary_p99_quiet": _ratio(flooded.seen.unary, quiet.unary),
        "ratio_unary_p99_control": _ratio(flooded.seen.unary, control.seen.unary),
        "ratio_after_first_s": _ratio(flooded.later.pulls, control.later.pulls),
        "ratio_unary_after_first_s": _ratio(flooded.later.unary, control.later.unary),
        "rate_before_per_s": round(base["served"] / base["seconds"], 1),
        "rate_later_per_s": round(later["served"] / later["seconds"], 1),
        "full_speed_after_s": None if full is None else round(full + late, 2),
    }


def _times(name: str, seen: Seen) -> dict[str, Any]:
    return {
        f"{name}_pulls": len(seen.pulls) + len(seen.unary),
        f"{name}_p50_s": percentile(seen.pulls, 50),
        f"{name}_p99_s": percentile(seen.pulls, 99),
        f"{name}_unary_p50_s": percentile(seen.unary, 50),
        f"{name}_unary_p99_s": percentile(seen.unary, 99),
    }


def _ratio(one: Sequence[float], other: Sequence[float]) -> float | None:
    mine, theirs = percentile(one, 99), percentile(other, 99)
    return round(mine / theirs, 2) if mine and theirs else None


def percentile(times: Sequence[float], share: int) -> float | None:
    """Returns the smallest time that `share` per cent of the times do not exceed; None without times."""
    if not times:
        return None
    ordered = sorted(times)
    return round(ordered[-(-len(ordered) * share // 100) - 1], 5)


def full_speed_s(slots: dict[str, int], rate: float) -> float | None:
    """Returns the time from which a lead serves at full speed for half a second, in seconds; None if it never does."""
    for first in range(int(AFTER_S / SLOT_S) - WINDOW_SLOTS + 1):
        served = sum(slots.get(str(slot), 0) for slot in range(first, first + WINDOW_SLOTS))
        if served >= FULL * rate * SLOT_S * WINDOW_SLOTS:
            return first * SLOT_S
    return None


def summary(limit: float, offered: float, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the medians over rounds, and all rounds."""
    found: dict[str, Any] = {"served_at_limit_per_s": round(limit, 1), "offered_per_s": round(offered, 1)}
    for name, value in rounds[0].items():
        values = [one[name] for one in rounds if isinstance(one[name], int | float)]
        if isinstance(value, int | float) and values:
            found[f"median_{name}"] = statistics.median(values)
    return found | {"rounds": list(rounds)}
