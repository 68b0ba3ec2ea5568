"""What the two sides of the connector tell each other in a step, and at the start."""

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvgrpc.core.policy.values import Loss
from kvgrpc.errors import KVGrpcError, NextStep
from kvgrpc.integrations.vllm.tensors.parts import Part


@dataclass
class MetStore(KVConnectorHandshakeMetadata):
    """The store of a worker."""

    address: str
    identity: str
    """What its KV is of: see `identity_of`."""


@dataclass(frozen=True)
class Put:
    """A part that is computed when this step is done."""

    request_id: str
    key: bytes
    to: str
    """Address of the consumer's rank 0; empty: it is kept."""
    part: Part
    blocks: list[int]
    ttl_s: float | None
    traceparent: str = ""


@dataclass(frozen=True)
class Expect:
    """Parts that a request takes, beside those that it was told to take before."""

    request_id: str
    key: bytes
    source: str
    """Address of the source's rank 0; empty: not known."""
    parts: list[Part]
    let_go: int = 0
    """So many parts, the first ones of the prompt, are refused from now on: nobody here takes them."""
    fetches: bool = False
    """The source keeps them; else it puts them here."""
    label: str = ""
    """What its transfers are called; empty: as the request is."""
    traceparent: str = ""


@dataclass(frozen=True)
class Load:
    """A request has blocks for what it took."""

    request_id: str
    first_block: int
    """The first of them, of the blocks of the prompt."""
    blocks: list[int]


@dataclass
class TensorStep(KVConnectorMetadata):
    """From the scheduler's side."""

    number: int = 0
    puts: list[Put] = field(default_factory=list)
    watches: list[Expect] = field(default_factory=list)
    """Requests that will take something, and wait in vLLM's queue."""
    expects: list[Expect] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    """Before the step computes."""
    left: list[str] = field(default_factory=list)
    """Requests that take nothing any more."""
    ended: list[bytes] = field(default_factory=list)
    """Keys under which nothing is put or taken any more."""
    given_back: dict[bytes, str] = field(default_factory=dict)
    """Of some of these keys: the address of the source's rank 0, which keeps tensors that nobody here takes."""
    failed: set[str] = field(default_factory=set)
    """Requests that wait for blocks to be filled, which will not be."""
    forget: bool = False
    """All that was put before ends."""
    idle: bool = False
    """Nothing is computed, and somebody waits."""


@dataclass
class Heard(KVConnectorWorkerMetadata):
    """From the workers: summed over them."""

    held: Counter[tuple[str, bytes, int]] = field(default_factory=Counter)
    """By request, transfer key and number of parts: how many workers have all these."""
    lost: dict[tuple[str, bytes], Loss] = field(default_factory=dict)
    """Requests and their transfer keys of which something will not come, and why."""
    forgot: Counter[int] = field(default_factory=Counter)
    """By step: how many workers have ended what was put before."""
    over: str = ""
    """Why a worker has no store any more."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Heard":
        assert isinstance(other, Heard)
        self.held += other.held
        self.forgot += other.forgot
        self.lost = {**other.lost, **self.lost}
        self.over = self.over or other.over
        return self

    def __bool__(self) -> bool:
        return bool(self.held or self.lost or self.forgot or self.over)


def loss_of(error: KVGrpcError) -> Loss:
    """Why something does not come that this ended."""
    return Loss(error.reason, error.sentence, error.next or NextStep.RECOMPUTE)
