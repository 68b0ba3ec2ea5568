"""What the two sides of the connector tell each other, and how they meet."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.integrations.vllm.identity import Kernels

MEET_S = 60.0
"""So long worker and scheduler wait for each other at the start."""
TICKET, ATTACHED = "ticket", "attached"
"""Files in the folder where they meet."""


@dataclass
class Met(KVConnectorHandshakeMetadata):
    """Where one worker waits for its ticket, and what only it knows of its KV."""

    folder: str
    kernels: list[Kernels]
    """For each group; see `kernels_of`."""
    layout: PoolLayout
    """Of its pipeline stage."""


@dataclass
class Step(KVConnectorMetadata):
    """What the scheduler's side tells the worker's in one step."""

    number: int = 0
    report: bool = True
    """Something may wait until it is done. What is not waited for is not said: a lead that shares the worker's
    processor takes half a millisecond of every step to hear it.
    """
    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    """Of those in `loaded`, the ones of which nothing came."""
    sent: set[str] = field(default_factory=set)
    """For the scheduler's side itself: what was handed over is done with."""


def agreed(stages: Sequence[Sequence[Met]]) -> list[Met]:
    """One rank of each pipeline stage: all compute and lay out their shares alike. Raises ValueError where one does
    not.
    """
    for stage, (first, *others) in enumerate(stages):
        for rank, met in enumerate(others, 1):
            if (met.kernels, met.layout) != (first.kernels, first.layout):
                raise ValueError(
                    f"KVGrpcConnector serves ranks that compute alike; of stage {stage} rank 0 has the kernels "
                    f"{first.kernels} and {first.layout}, rank {rank} has {met.kernels} and {met.layout}. To do: run "
                    "all workers of this engine on the same kind of processor or device"
                )
    return [first for first, *_ in stages]


def kernels_of_groups(stages: Sequence[Met]) -> Kernels:
    """Those of all layers, group by group, and within each stage by stage; each once where it follows itself."""
    found = [
        kernel
        for of_group in zip(*(met.kernels for met in stages), strict=True)
        for some in of_group
        for kernel in some
    ]
    return [kernel for kernel, _ in itertools.groupby(found)]


def wait_for(path: Path) -> None:
    """Raises TimeoutError."""
    deadline = time.monotonic() + MEET_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"kvgrpc: the other side did not come within {MEET_S:g} s ({path})")
        time.sleep(0.01)
