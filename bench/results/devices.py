"""Results of `python -m bench pull --device`."""

from dataclasses import dataclass, field

from bench.results.pulls import Run
from bench.results.targets import Target

DEVICE_BASELINES = {
    "copies": "those between the device and page-locked host memory alone, of the same blocks, by as many streams",
    "out": "from a device to an engine with shared memory, from the hand-over to the woken destination",
    "in": "from an engine with shared memory to a device",
    "between": "by cuda_vmm between two engines on one device; the copies are those of the same runs by the driver",
}


@dataclass(frozen=True)
class DeviceCase:
    """Pulls out of a device, into one, or between two engines on one. The ratio is the median, over pairs, of the time
    of the copies over ours.
    """

    direction: str
    datapath: str
    block_bytes: int
    blocks: int
    layout: str
    gbps: float
    copy_gbps: float
    ratio_copies: float
    quartiles: dict[str, list[float]] = field(default_factory=dict)
    """First and third quartile of the repeats, by name of a figure."""


@dataclass
class DeviceResult(Run):
    """A run with a device."""

    device: str = ""
    cases: list[DeviceCase] = field(default_factory=list)

    def targets(self) -> list[Target]:
        return []

    def figures(self) -> dict[str, float | None]:
        return {}
