"""What it costs to be observed: metrics and traces, as shares of a pull's processor time at both servers.

Pairs of servers are measured in turn, each beside one that nobody observes. The collector of spans is a process of its
own, whose time does not count.
"""

import contextlib
import itertools
import secrets
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.measures.rate import ServerPair, pair
from bench.plan import METRICS, PullPlan, environment_of
from bench.results.pulls import PullResult
from bench.stages.hosts import Host
from bench.stages.processors import spent_ms

_ANY_PORT = "127.0.0.1:0"
_SCRAPES = 15
_ROUNDS = 3
"""Number of samples of each pair of servers in a repeat: differences of a hundredth need many."""


@dataclass(frozen=True)
class _Way:
    """One way to be observed: the environment of both servers, and the share of pulls that are recorded. None: no pull
    has a trace context at all.
    """

    environment: dict[str, str]
    recorded: float | None = None


async def measure(plan: PullPlan, found: PullResult) -> None:
    """Fills in the figures. Raises KVGrpcError if a call fails."""
    with contextlib.closing(Host("collector")) as collector:
        exported = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.ask("start")["endpoint"],
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": "0.01",
        }
        ways = {
            "plain": _Way({}),
            "metrics": _Way({METRICS: _ANY_PORT}),
            "off": _Way({}, 0.0),
            "one_percent": _Way(exported, 0.01),
            "all": _Way(exported, 1.0),
        }
        ratios = await _ratios(plan, ways)
        assert collector.ask("received")["nbytes"], "no span was exported"
    found.metrics_ratio = ratios["metrics"]
    found.tracing_off_ratio = ratios["off"]
    found.tracing_1_percent_ratio = ratios["one_percent"]
    found.tracing_100_percent_ratio = ratios["all"]
    found.scrape_10000_ms = await _scrape_ms(plan)


async def _ratios(plan: PullPlan, ways: Mapping[str, _Way]) -> dict[str, float]:
    """Returns by way the median over repeats of its processor time over that of the plain servers of that repeat."""
    usual = environment_of(plan.data_paths[0])
    samples: dict[str, list[float]] = {name: [] for name in ways}
    async with contextlib.AsyncExitStack() as stack:
        servers = {
            name: await stack.enter_async_context(pair(plan, {**usual, **way.environment}))
            for name, way in ways.items()
        }
        for name, way in ways.items():
            servers[name].caller.trace = _traces(way.recorded)
            await _sample_ms(servers[name])
        for number in range(plan.repeats * _ROUNDS):
            names = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
            for name in names:
                samples[name].append(await _sample_ms(servers[name]))
    plain = samples["plain"]
    return {
        name: statistics.median(a / b for a, b in zip(found, plain, strict=True)) for name, found in samples.items()
    }


async def _sample_ms(servers: ServerPair) -> float:
    """Returns the processor time of one pull at both servers, in milliseconds."""
    plan = servers.plan

    async def pull() -> None:
        await servers.caller.at_once(plan.rate_pulls, plan.in_flight)

    spent = await spent_ms(servers.source, servers.destination, plan.rate_pulls, pull)
    return spent["processor_ms_source"] + spent["processor_ms_destination"]


def _traces(recorded: float | None) -> Callable[[], str]:
    """Returns a maker of trace contexts, of which a share says that it is recorded."""
    if recorded is None:
        return str
    numbers = itertools.count()

    def make() -> str:
        number = next(numbers)
        sampled = int((number + 1) * recorded) > int(number * recorded)
        return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{int(sampled):02x}"

    return make


async def _scrape_ms(plan: PullPlan) -> float:
    """Returns the median time for which a scrape holds the event loop of a lead with many leases."""
    async with pair(plan, environment_of(plan.data_paths[0]) | {METRICS: _ANY_PORT}) as servers:
        await servers.caller.leave_leases(plan.scraped_leases)
        held: list[float] = servers.source.ask("scrapes", count=_SCRAPES)["held_ms"]
    return statistics.median(held)
