"""Pulls out of a device's memory and into it, by way of its mirror, beside the copies alone."""

import statistics

from kvgrpc.bench.measures.timed_pairs import timed_pairs
from kvgrpc.bench.plan import Case, PullPlan
from kvgrpc.bench.results.devices import DeviceCase, DeviceResult
from kvgrpc.bench.stages.devices import DeviceEngines, MakeDevices
from kvgrpc.bench.stages.servers import Progress
from kvgrpc.engine import Device

_WARM = 2
OUT, IN = "out", "in"
DEVICES = ("host", "cuda")


def missing(device: str) -> str:
    """Why there is no such device, as text; empty: there is one."""
    if device != "cuda":
        return ""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} finds no CUDA device"


def cuda(nbytes: int) -> tuple[Device, Device]:
    """Both views of as much memory of the first CUDA device."""
    import torch

    from kvgrpc.engine.cuda import CudaDevice

    tensors = [torch.zeros(nbytes, dtype=torch.uint8, device="cuda:0")]
    return CudaDevice(tensors), CudaDevice(tensors)


def measure(plan: PullPlan, found: DeviceResult, make: MakeDevices, progress: Progress) -> None:
    """All cases of the plan, in both directions."""
    for data_path in plan.data_paths:
        for block_bytes in plan.block_bytes:
            for case in plan.cases(data_path, block_bytes):
                for direction in (OUT, IN):
                    progress(f"{case.title}, {direction}")
                    found.cases.append(_case(plan, case, direction, make))


def _case(plan: PullPlan, case: Case, direction: str, make: MakeDevices) -> DeviceCase:
    with DeviceEngines(case, make, out=direction == OUT) as engines:
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
    )
