"""One run: starts the processes, measures what the plan says, ends them."""

import contextlib
from collections.abc import Callable

from kvgrpc.bench import leases
from kvgrpc.bench.bandwidth import Bandwidth
from kvgrpc.bench.hosts import Host
from kvgrpc.bench.latency import Latency
from kvgrpc.bench.machine import machine, versions
from kvgrpc.bench.plan import Plan
from kvgrpc.bench.result import BASELINES, Result


async def run(plan: Plan, progress: Callable[[str], None]) -> Result:
    """Measures. `progress` is told what is being measured. Raises KVGrpcError when something broke."""
    found = Result(plan.quick, plan.repeats, machine(), versions(), BASELINES)
    if "leases" in plan.parts:
        progress(f"leases with {plan.leases_few} and {plan.leases_many} alive")
        cost = leases.measure(plan)
        found.lease_us, found.lease_cost_ratio_100k = cost.few_us, cost.ratio
    with contextlib.ExitStack() as stack:
        source, destination, baseline = (
            stack.enter_context(contextlib.closing(Host(role))) for role in ("server", "server", "baseline")
        )
        if "latency" in plan.parts:
            progress("single pulls and calls")
            await Latency(plan, source, destination, baseline).run(found)
        if "bandwidth" in plan.parts:
            bandwidth = Bandwidth(plan, source, destination, baseline, progress)
            with contextlib.closing(bandwidth):
                found.cases = await bandwidth.run()
                found.coalescing_ratio = bandwidth.coalescing_ratio
                found.memcpy_whole_gbps = bandwidth.copy_whole() / 1e9
    return found
