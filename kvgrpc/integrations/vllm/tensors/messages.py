"""Messages between the two sides of the connector, in each step and at the start."""

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorWorkerMetadata

from kvgrpc.core.policy.values import Loss
from kvgrpc.errors import KVGrpcError, NextStep
from kvgrpc.integrations.vllm.meeting import BlockStep
from kvgrpc.integrations.vllm.tensors.parts import PromptPart


@dataclass
class StoreGreeting(KVConnectorHandshakeMetadata):
    """The store of a worker."""

    address: str
    identity: str
    """Identity of the KV, from `identity_of`."""


@dataclass(frozen=True)
class PutTask:
    """A part to put. It is computed when this step is done."""

    request_id: str
    key: bytes
    to: str
    """Address of the consumer's rank 0; empty: the part is kept here."""
    part: PromptPart
    blocks: list[int]
    ttl_s: float | None
    traceparent: str = ""


@dataclass(frozen=True)
class ExpectTask:
    """Parts that a request takes, in addition to earlier ones."""

    request_id: str
    key: bytes
    source: str
    """Address of the source's rank 0; empty: not known."""
    parts: list[PromptPart]
    let_go: int = 0
    """Number of leading parts of the prompt that are refused from now on: nobody here takes them."""
    fetches: bool = False
    """True if the source keeps the tensors. False if it puts them here."""
    label: str = ""
    """Label of the transfers; empty: the request's id."""
    traceparent: str = ""


@dataclass(frozen=True)
class LoadTask:
    """Blocks of a request, to be filled with what it took."""

    request_id: str
    first_block: int
    """Index of the first one among the blocks of the prompt."""
    blocks: list[int]


@dataclass
class TensorStep(BlockStep):
    """The tasks of the workers in one step. Loads of `failed` requests wait for their blocks to be filled, in vain."""

    puts: list[PutTask] = field(default_factory=list)
    watches: list[ExpectTask] = field(default_factory=list)
    """Requests that will take tensors, and wait in vLLM's queue."""
    expects: list[ExpectTask] = field(default_factory=list)
    loads: list[LoadTask] = field(default_factory=list)
    """Loads to do before the step computes."""
    left: list[str] = field(default_factory=list)
    """Requests that take nothing any more."""
    ended: list[bytes] = field(default_factory=list)
    """Keys under which nothing is put or taken any more."""
    given_back: dict[bytes, str] = field(default_factory=dict)
    """Some of the `ended` keys -> address of the source's rank 0. The source keeps tensors that nobody here takes."""
    forget: bool = False
    """True if all that was put before this step is to end."""
    idle: bool = False
    """True if nothing is computed and a request waits for tensors."""


@dataclass
class WorkerNews(KVConnectorWorkerMetadata):
    """News from the workers, summed over them."""

    held: Counter[tuple[str, bytes, int]] = field(default_factory=Counter)
    """Request, transfer key and number of parts -> number of workers that hold all these parts."""
    lost: dict[tuple[str, bytes], Loss] = field(default_factory=dict)
    """Requests with their transfer keys -> reason why a tensor will not come."""
    forgot: Counter[int] = field(default_factory=Counter)
    """Step -> number of workers that have ended what was put before it."""
    over: str = ""
    """Reason why a worker has no store any more; empty: all have one."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerNews":
        assert isinstance(other, WorkerNews)
        self.held += other.held
        self.forgot += other.forgot
        self.lost = {**other.lost, **self.lost}
        self.over = self.over or other.over
        return self

    def __bool__(self) -> bool:
        return bool(self.held or self.lost or self.forgot or self.over)


def loss_of(error: KVGrpcError) -> Loss:
    """Returns the loss of a request whose tensor ended with this error."""
    return Loss(error.reason, error.sentence, error.next or NextStep.RECOMPUTE)
