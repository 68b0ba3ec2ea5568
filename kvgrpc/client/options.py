"""Optional arguments of the client's methods, by name and type.

Each is the field of the same name in the request message, where its comment is the contract; `_s` marks seconds where
the field is a Duration. Left out means what the schema says for an unset field.
"""

from typing import TypedDict

from kvgrpc.v1.common_pb2 import Failure, Grant, Intent, OnAbort, PeerAddress
from kvgrpc.v1.handoff_pb2 import WaitsFor
from kvgrpc.v1.transfer_pb2 import MemoryDisposition, TransferState


class Call(TypedDict, total=False):
    """Of every call. There is always a deadline: `timeout_s` replaces the client's own for this call, retries
    included.
    """

    timeout_s: float


class Change(Call, total=False):
    """Of every call that changes something. The default is a fresh key, so that retries act once. To repeat a call
    yourself, give the same key and the same arguments again; empty switches deduplication off.
    """

    idempotency_key: str


class OwnBlocks(Change, total=False):
    """Of calls that name blocks of this engine. `incarnation` is the life that their ids are of: the header's of the
    reply that gave them out. With the reply itself as `blocks` it needs no saying.
    """

    incarnation: int


class Allocation(Change, total=False):
    """Of allocate and renew_allocation."""

    ttl_s: float


class Renewing(Call, total=False):
    """Of renew_leases."""

    ttl_s: float


class HandOver(OwnBlocks, total=False):
    """Of finished_blocks. `transfer_key` is a fresh one and `last` is set unless given."""

    transfer_key: bytes
    request_id: str
    ttl_s: float
    consumers: int
    on_abort: OnAbort.ValueType
    waits_for: WaitsFor.ValueType
    last: bool
    layers: tuple[int, int]  # first layer, number of layers
    part_epoch: int
    failure: Failure
    after_step: int
    lease_id: str
    priority: int
    validate_only: bool


class Pull(Change, total=False):
    """Of pull_blocks."""

    use_tokens: int
    transfer_key: bytes
    request_id: str
    priority: int
    after_step: int
    queue_timeout_s: float
    transfer_timeout_s: float
    validate_only: bool


class Reservation(OwnBlocks, total=False):
    """Of reserve_blocks."""

    request_id: str
    have_tokens: int
    use_tokens: int
    source: PeerAddress
    after_step: int
    registration_timeout_s: float
    priority: int
    validate_only: bool


class LeaseTerms(OwnBlocks, total=False):
    """Of grant_lease and lease."""

    ttl_s: float
    consumers: int
    on_abort: OnAbort.ValueType
    request_id: str
    transfer_key: bytes
    labels: dict[str, str]


class Which(TypedDict, total=False):
    """Which transfers: all that is given must match."""

    request_id: str
    trace_id: str
    peer_engine_id: str
    states: list[TransferState.ValueType]
    memory: list[MemoryDisposition.ValueType]
    min_age_s: float


class Rows(Call, total=False):
    """Of calls that list. `limit` bounds the number of rows; without it all pages are fetched."""

    limit: int


class Listing(Which, Rows, total=False):
    """Of list_transfers."""


class Arrival(Call, total=False):
    """Of request_arrived. Without `incarnation` it is meant for the life that the scheduler knows."""

    target: Grant
    intent: Intent
    needs_all_outputs: bool
    traceparent: str
    incarnation: int


class Table(Call, total=False):
    """Of calls that list the blocks of a request. `incarnation` is the life that they are of, where that is not the one
    that the scheduler knows.
    """

    dropped_blocks: list[int]
    incarnation: int


class Allocated(Table, total=False):
    """Of blocks_allocated."""

    computed_tokens: int
    external_tokens: int
    after_step: int


class Computed(Table, total=False):
    """Of tokens_computed and request_finished."""

    step: int


class Reading(Call, total=False):
    """Of read_blocks."""

    incarnation: int
    layers: tuple[int, int]  # first layer, number of layers
