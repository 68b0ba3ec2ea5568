"""What the two sides of the connector tell each other, and how they meet."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

MEET_S = 60.0
"""So long worker and scheduler wait for each other at the start."""
TICKET, ATTACHED = "ticket", "attached"
"""Files in the folder where they meet."""


@dataclass
class Met(KVConnectorHandshakeMetadata):
    """Where one worker waits for its ticket, and what only it knows of its KV."""

    folder: str
    kernels: list[list[str]]
    """See `kernels_of`."""


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


def agreed_kernels(ranks: Sequence[Met]) -> list[list[str]]:
    """What every rank computes its share of the KV with. Raises ValueError where one has other kernels."""
    first, *others = [met.kernels for met in ranks]
    for rank, kernels in enumerate(others, 1):
        if kernels != first:
            raise ValueError(
                f"KVGrpcConnector serves ranks that compute alike; rank 0 has the kernels {first}, rank {rank} has "
                f"{kernels}. To do: run all workers of this engine on the same kind of processor or device"
            )
    return first


def wait_for(path: Path) -> None:
    """Raises TimeoutError."""
    deadline = time.monotonic() + MEET_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"kvgrpc: the other side did not come within {MEET_S:g} s ({path})")
        time.sleep(0.01)
