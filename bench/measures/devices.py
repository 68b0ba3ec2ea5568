"""Pulls out of a device's memory and into it by way of its mirror, or between two engines on it, beside the copies
alone.
"""

import statistics
from collections.abc import Callable

from bench.measures.timed_pairs import quartiles, timed_pairs
from bench.plan import CUDA_VMM, Case, PullPlan
from bench.results.devices import DeviceCase, DeviceResult
from bench.stages.devices import DeviceEngines, MakeDevices
from bench.stages.gpus import CudaPool, GpuEngines, GpuPool
from bench.told import Told
from kvgrpc.engine import Device

_WARM = 2
OUT, IN, BETWEEN = "out", "in", "between"
DEVICES = ("host", "cuda")


def missing(device: str) -> str:
    """Returns why there is no such device, or "" if there is one."""
    if device != "cuda":
        return ""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} finds no CUDA device"


def cuda(nbytes: int) -> tuple[Device, Device]:
    """Returns both views of `nbytes` of memory of the first CUDA device."""
    import torch

    from kvgrpc.engine.cuda import CudaDevice

    tensors = [torch.zeros(nbytes, dtype=torch.uint8, device="cuda:0")]
    return CudaDevice(tensors), CudaDevice(tensors)


def cuda_pool(nbytes: int) -> CudaPool:
    """Returns `nbytes` of memory of the first CUDA device, of which peers get descriptors."""
    return CudaPool(nbytes)


def measure(
    plan: PullPlan,
    found: DeviceResult,
    make: MakeDevices,
    told: Told,
    make_pool: Callable[[int], GpuPool] = cuda_pool,
) -> None:
    """Measures all cases of the plan: in both directions by way of a mirror, and between two engines by cuda_vmm."""
    for data_path in plan.data_paths:
        for block_bytes in plan.block_bytes:
            for case in plan.cases(data_path, block_bytes):
                for direction in (BETWEEN,) if data_path == CUDA_VMM else (OUT, IN):
                    told(f"{case.title}, {direction}")
                    if direction == BETWEEN:
                        stage: DeviceEngines | GpuEngines = GpuEngines(case, make_pool)
                    else:
                        stage = DeviceEngines(case, make, out=direction == OUT)
                    found.cases.append(_case(plan, case, direction, stage))


def _case(plan: PullPlan, case: Case, direction: str, stage: DeviceEngines | GpuEngines) -> DeviceCase:
    with stage as engines:
        engines.check()
        for _ in range(_WARM):
            engines.pull_s(), engines.copy_s()
        times = timed_pairs(plan.repeats, engines.pull_s, engines.copy_s)
    return DeviceCase(
        direction=direction,
        datapath=case.data_path,
        block_bytes=case.block_bytes,
        blocks=case.blocks,
        layout=case.layout,
        gbps=case.nbytes / statistics.median(pulled for pulled, _ in times) / 1e9,
        copy_gbps=case.nbytes / statistics.median(copied for _, copied in times) / 1e9,
        ratio_copies=statistics.median(copied / pulled for pulled, copied in times),
        quartiles={
            "gbps": quartiles([case.nbytes / pulled / 1e9 for pulled, _ in times]),
            "copy_gbps": quartiles([case.nbytes / copied / 1e9 for _, copied in times]),
            "ratio_copies": quartiles([copied / pulled for pulled, copied in times]),
        },
    )
