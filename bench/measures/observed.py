"""What it costs to be observed: metrics and traces, as shares of a pull's processor time at both servers.

All ways are measured in turn, each beside servers that nobody observes. The collector of spans is a process of its
own, whose time does not count.
"""

import contextlib
import itertools
import secrets
import statistics
from collections.abc import Callable, Mapping

from bench.measures.rate import ServerPair, pair
from bench.plan import METRICS, PullPlan, environment_of
from bench.results.pulls import PullResult
from bench.stages.hosts import Host
from bench.stages.processors import spent_ms

_ANY_PORT = "127.0.0.1:0"
_SCRAPES = 15
_ROUNDS = 5
"""Number of samples of each way in a repeat: differences of a hundredth need many."""


_WAYS: dict[str, tuple[str, float | None]] = {
    "plain": ("plain", None),
    "metrics": ("metrics", None),
    "off": ("plain", 0.0),
    "one_percent": ("exporting", 0.01),
    "all": ("exporting", 1.0),
}
"""By way: the pair of servers, and the share of pulls that are recorded. None: no pull has a trace context at all."""


async def measure(plan: PullPlan, found: PullResult) -> None:
    """Fills in the figures. Raises KVGrpcError if a call fails."""
    with contextlib.closing(Host("collector")) as collector:
        exported = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.ask("start")["endpoint"],
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": "0.01",
        }
        environments: dict[str, dict[str, str]] = {"plain": {}, "metrics": {METRICS: _ANY_PORT}, "exporting": exported}
        ratios = await _ratios(plan, environments)
        assert collector.ask("received")["nbytes"], "no span was exported"
    found.metrics_ratio = ratios["metrics"]
    found.tracing_off_ratio = ratios["off"]
    found.tracing_1_percent_ratio = ratios["one_percent"]
    found.tracing_100_percent_ratio = ratios["all"]
    found.scrape_10000_ms = await _scrape_ms(plan)


async def _ratios(plan: PullPlan, environments: Mapping[str, dict[str, str]]) -> dict[str, float]:
    """Returns by way the median over rounds of its processor time over that of the plain servers of that round."""
    usual = environment_of(plan.data_paths[0])
    samples: dict[str, list[float]] = {name: [] for name in _WAYS}
    async with contextlib.AsyncExitStack() as stack:
        servers = {
            name: await stack.enter_async_context(pair(plan, {**usual, **more})) for name, more in environments.items()
        }
        for one in servers.values():
            await _sample_ms(one)
        for number in range(plan.repeats * _ROUNDS):
            names = list(_WAYS)[number % len(_WAYS) :] + list(_WAYS)[: number % len(_WAYS)]
            for name in names:
                which, recorded = _WAYS[name]
                servers[which].caller.trace = _traces(recorded)
                samples[name].append(await _sample_ms(servers[which]))
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
