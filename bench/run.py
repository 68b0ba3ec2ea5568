"""Runs a plan: starts the processes, measures, and ends them."""

import asyncio

from bench.machine import machine, versions
from bench.measures import devices, geometries, layerwise, leases, observed, push, rate, tensors, tls, window
from bench.measures.bandwidth import PullBandwidth
from bench.measures.latency import Latency
from bench.plan import GeometryPlan, LayerwisePlan, PullPlan, PushPlan, TensorsPlan, environment_of
from bench.results.devices import DEVICE_BASELINES, DeviceResult
from bench.results.geometries import BASELINES as GEOMETRY_BASELINES, GeometryResult
from bench.results.pulls import BASELINES, PullResult
from bench.results.pushes import LAYERWISE_BASELINES, PUSH_BASELINES, LayerwiseResult, PushResult
from bench.results.tensors import BASELINES as TENSOR_BASELINES, TensorResult
from bench.stages.devices import MakeDevices
from bench.stages.servers import ServerStage
from bench.told import Told


async def run_pull(plan: PullPlan, told: Told, *, profile: bool = False) -> PullResult:
    """Measures pulls. `told` is told what is being measured. `profile` adds a profile of processor time.

    Raises KVGrpcError if a call fails.
    """
    found = PullResult(plan.quick, plan.repeats, machine(), versions(), BASELINES)
    if "leases" in plan.parts:
        told(f"leases with {plan.leases_few} and {plan.leases_many} alive")
        cost = leases.measure(plan)
        found.lease_us, found.lease_cost_ratio_100k = cost.few_us, cost.ratio
    if "rate" in plan.parts:
        told(f"{plan.in_flight} pulls at once")
        await rate.measure(plan, found)
    if "tls" in plan.parts:
        told("calls and pulls under TLS, and in plain text")
        await tls.measure(plan, found)
        told("whole pools over window, and over shm")
        await window.measure(plan, found)
    if "metrics" in plan.parts:
        told("pulls with metrics and traces, and without")
        await observed.measure(plan, found)
    if not {"latency", "bandwidth"}.intersection(plan.parts):
        return found
    with ServerStage(plan, told, environment_of(plan.data_paths[0])) as stage:
        if "latency" in plan.parts:
            told("single pulls and calls")
            latency = Latency(plan, stage.source, stage.destination, stage.baseline, profile=profile)
            await latency.run(found)
        if "bandwidth" in plan.parts:
            bandwidth = PullBandwidth(plan, stage, told)
            found.cases = await bandwidth.run()
            found.coalescing_ratio = bandwidth.coalescing_ratio
            found.memcpy_whole_gbps = stage.copy_whole() / 1e9
    return found


async def run_devices(plan: PullPlan, device: str, told: Told, make: MakeDevices = devices.cuda) -> DeviceResult:
    """Measures pulls like `run_pull`, out of a device's memory and into it."""
    found = DeviceResult(plan.quick, plan.repeats, machine(), versions(), DEVICE_BASELINES, device)
    devices.measure(plan, found, make, told)
    return found


async def run_push(plan: PushPlan, told: Told, *, profile: bool = False) -> PushResult:
    """Measures pushes like `run_pull`."""
    found = PushResult(plan.quick, plan.repeats, machine(), versions(), PUSH_BASELINES)
    await push.measure(plan, found, told, profile=profile)
    return found


async def run_geometry(plan: GeometryPlan, told: Told) -> GeometryResult:
    """Measures geometries like `run_pull`."""
    found = GeometryResult(plan.quick, plan.repeats, machine(), versions(), GEOMETRY_BASELINES)
    geometries.measure(plan, found, told)
    return found


async def run_tensors(plan: TensorsPlan, told: Told) -> TensorResult:
    """Measures named tensors like `run_pull`."""
    found = TensorResult(plan.quick, plan.repeats, machine(), versions(), TENSOR_BASELINES)
    await asyncio.to_thread(tensors.measure, plan, found, told)
    return found


async def run_layerwise(plan: LayerwisePlan, told: Told) -> LayerwiseResult:
    """Measures layer-wise pushes like `run_pull`."""
    found = LayerwiseResult(plan.quick, plan.repeats, machine(), versions(), LAYERWISE_BASELINES)
    found.cases = layerwise.measure(plan, told)
    found.visible_ratio = max(case.visible_ratio for case in found.cases)
    return found
