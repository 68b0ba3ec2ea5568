"""The messages between the two sides of the connector, and their meeting at the start."""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from socket import gethostname
from typing import Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.core.values.networks import is_loopback
from kvgrpc.engine import Engine
from kvgrpc.errors import note
from kvgrpc.integrations.vllm.geometry import unserved
from kvgrpc.integrations.vllm.identity import Kernels
from kvgrpc.integrations.vllm.places import FolderPlace, MeetingPlace, StorePlace

MEET_S = 60.0
"""Maximum time that worker and scheduler wait for each other at the start, in seconds."""
MIRROR_S = 600.0
"""Maximum time if workers make mirrors, in seconds: host memory as large as the cache, all of which is page-locked."""
TICKET, ATTACHED = "ticket", "attached"
"""Texts in the place of a worker. ATTACHED says why a worker could not attach, or nothing."""
DIFFERENCES_MAX, VALUE_BYTES_MAX = 4, 200
"""Maximum number of differences of ranks that are shown, and maximum size of each value."""
T = TypeVar("T")


@dataclass
class WorkerGreeting(KVConnectorHandshakeMetadata):
    """A worker's message: where it waits for its ticket, and what only it knows of its KV."""

    folder: str
    """Its own folder: the place of a worker on the scheduler's node."""
    kernels: list[Kernels]
    """Kernels of each group; see `kernels_of`."""
    layout: PoolLayout
    """Layout of its pipeline stage."""
    host: str = ""
    """Name of the worker's host, for messages."""
    alone: bool = True
    """True if it is its engine's one connector; False in a MultiConnector, beside others."""
    store: str = ""
    """Address of the store where it waits, if it is on another of vLLM's nodes than the scheduler."""

    @property
    def place(self) -> MeetingPlace:
        """The place where the worker waits for its ticket."""
        return StorePlace(self.store, f"{self.host}{self.folder}") if self.store else FolderPlace(Path(self.folder))


@dataclass
class BlockStep(KVConnectorMetadata):
    """A message of the scheduler's side to the worker's, for one step."""

    number: int = 0
    report: bool = True
    """True if something may wait for the end of the step. Other steps are not reported: a lead that shares the worker's
    processor takes half a millisecond of every step to hear it.
    """
    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    """Requests of `loaded` that vLLM is to fail, since nothing came."""
    sent: set[str] = field(default_factory=set)
    """Requests whose hand-overs are done with; for the scheduler's side itself."""


def check_here(stages: Sequence[Sequence[WorkerGreeting]]) -> None:
    """Raises ValueError if a worker is on another host that is no node of vLLM's own: nothing brings it its ticket."""
    for stage, ranks in enumerate(stages):
        for rank, met in enumerate(ranks):
            if not met.store and not Path(met.folder).is_dir():
                raise unserved(
                    f"workers on another host than their scheduler's as vLLM's own nodes alone; rank {rank} of stage "
                    f"{stage} is on {met.host}, and {met.folder} is not on {gethostname()}",
                    "keep all workers of an engine on one host and in one container, with Ray too, or start the engine "
                    "on each of its hosts with --nnodes and --node-rank",
                )


def check_reached(workers: Sequence[WorkerGreeting], address: str) -> None:
    """Raises ValueError if a worker is on another host, and the lead's address means this host there."""
    host = address.rpartition(":")[0].strip("[]")
    for met in workers:
        if met.store and met.host != gethostname() and is_loopback(host):
            raise unserved(
                f"workers on another host only where they reach their lead; one is on {met.host}, and the lead serves "
                f"at {address}",
                'set "listen" to an address of this host that the other one reaches, such as "10.0.0.1:50051", and '
                '"serve_flags" to those of TLS, or to ["--insecure"] on a network that nobody else reads',
            )


def of_ours(kind: type[T], met: Sequence[Any]) -> list[T]:
    """Returns the messages of our workers. A MultiConnector hands on the message of the first of its connectors that
    has one. Raises ValueError if that is another connector.
    """
    if others := {type(of).__name__ for of in met if not isinstance(of, kind)}:
        raise unserved(
            f"no engine beside a connector that has a handshake of its own: its workers said {', '.join(others)}",
            "leave that connector out of the MultiConnector",
        )
    return list(met)


def agreed(stages: Sequence[Sequence[WorkerGreeting]]) -> list[WorkerGreeting]:
    """Returns one rank of each pipeline stage: all ranks of a stage compute and lay out their shares alike. Raises
    ValueError if one does not.
    """
    for stage, (first, *others) in enumerate(stages):
        for rank, met in enumerate(others, 1):
            different = itertools.chain(
                _different("kernels", first.kernels, met.kernels), _different("layout", first.layout, met.layout)
            )
            if found := list(itertools.islice(different, DIFFERENCES_MAX + 1)):
                found[DIFFERENCES_MAX:] = ["…"] * len(found[DIFFERENCES_MAX:])
                raise unserved(
                    f"ranks that compute alike; of stage {stage} ranks 0 and {rank} differ in {', '.join(found)}",
                    "run all workers of this engine on the same kind of processor or device",
                )
    return [first for first, *_ in stages]


def _different(name: str, one: Any, other: Any) -> Iterator[str]:
    """Yields the innermost values that differ, with the way to each."""
    if one == other:
        return
    if is_dataclass(one) and type(one) is type(other):
        for part in fields(one):
            yield from _different(f"{name}.{part.name}", getattr(one, part.name), getattr(other, part.name))
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            yield from _different(f"{name}[{number}]", mine, theirs)
    else:
        yield f"{name}: {note(str(one), VALUE_BYTES_MAX)} and {note(str(other), VALUE_BYTES_MAX)}"


def kernels_of_groups(stages: Sequence[WorkerGreeting]) -> Kernels:
    """Returns the kernels of all layers, by group and within a group by stage; equal neighbours count once."""
    found = [
        kernel
        for of_group in zip(*(met.kernels for met in stages), strict=True)
        for some in of_group
        for kernel in some
    ]
    return [kernel for kernel, _ in itertools.groupby(found)]


def give_tickets(engine: Engine, workers: Sequence[tuple[WorkerGreeting, Sequence[int]]], within_s: float) -> None:
    """Gives the worker of each rank its ticket, and waits until all of them are attached. `workers`: each with the
    number of its first layer in each group.

    Raises TimeoutError, RuntimeError for a worker that could not attach, and ValueError for a worker that another such
    connector has attached, or that does not reach the lead.
    """
    check_reached([met for met, _ in workers], engine.address)
    places = [met.place for met, _ in workers]
    for rank, (place, (_, first_layers)) in enumerate(zip(places, workers, strict=True)):
        if place.has(ATTACHED):
            raise unserved("an engine once", "leave one of them out of the MultiConnector")
        ticket = engine.remote_ticket if place.far else engine.ticket
        row = {**asdict(ticket), "secret": ticket.secret.hex(), "rank": rank, "first_layers": first_layers}
        place.say(TICKET, json.dumps(row))
    for rank, place in enumerate(places):
        if error := place.hear(ATTACHED, within_s):
            raise RuntimeError(f"kvgrpc: worker {rank} could not attach: {error}")
