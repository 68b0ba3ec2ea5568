"""Optional arguments of the client's methods, by name and type.

Each is the request field of the same name, whose comment is the contract. `_s` marks seconds for a field of type
Duration, and `consumers` is the field `consumer_count`. An omitted option is an unset field.
"""

from collections.abc import Sequence
from typing import TypedDict

from kvgrpc.v1.common_pb2 import Grant, Intent, OnAbort, PeerAddress
from kvgrpc.v1.transfer_pb2 import CancelScope, Direction, MemoryDisposition, TransferState, TransferWait


class CallOptions(TypedDict, total=False):
    """Options of every call. Every call has a deadline: `timeout_s` replaces the client's own for this call, retries
    included.
    """

    timeout_s: float


class ChangeOptions(CallOptions, total=False):
    """Options of every call that changes something. The default key is fresh, so that retries act at most once. To
    repeat a call yourself, give the same key and arguments again. An empty key turns deduplication off.
    """

    idempotency_key: str


class TrialOptions(CallOptions, total=False):
    """Options of calls that can be tried: `validate_only` checks all that the server can check and changes nothing. The
    reply says what the call would do, without ids and grants.
    """

    validate_only: bool


class EffectOptions(ChangeOptions, TrialOptions, total=False):
    """Options of calls that change something and can be tried."""


class OwnBlocksOptions(EffectOptions, total=False):
    """Options of calls that name blocks of this engine. `incarnation` is the life that bare ids belong to, from the
    header of the reply that gave them out. A message of blocks carries it itself.
    """

    incarnation: int


class RenewAllocationOptions(EffectOptions, total=False):
    """Options of renew_allocation."""

    ttl_s: float


class PutTensorOptions(CallOptions, total=False):
    """Options of Tensors.put."""

    consumers: int
    ttl_s: float
    asynchronous: bool
    request_id: str


class AllocateOptions(RenewAllocationOptions, total=False):
    """Options of allocate."""

    no_expiry: bool
    reclaim: bool
    request_time_us: int  # with `reclaim`
    request_id: str
    label: str


class ReclaimOptions(EffectOptions, total=False):
    """Options of reclaim."""

    request_time_us: int
    request_id: str


class RenewLeasesOptions(TrialOptions, total=False):
    """Options of renew_leases."""

    ttl_s: float


class FinishedBlocksOptions(OwnBlocksOptions, total=False):
    """Options of finished_blocks. `transfer_key` is fresh unless given."""

    transfer_key: bytes
    request_id: str
    ttl_s: float
    firm_ttl_s: float
    consumers: int
    on_abort: OnAbort.ValueType
    after_step: int
    lease_id: str
    priority: int
    request_time_us: int
    tenant: str
    bound_to: str
    findable: bool


class PushPartOptions(OwnBlocksOptions, total=False):
    """Options of push_part."""

    request_id: str
    layers: tuple[int, int]  # first layer, number of layers
    part_epoch: int
    last: bool
    ttl_s: float
    firm_ttl_s: float
    consumers: int
    on_abort: OnAbort.ValueType
    after_step: int
    lease_id: str
    priority: int


class PullTerms(TypedDict, total=False):
    """Options of pull and pull_blocks."""

    use_tokens: int
    allow_prefix: bool
    transfer_key: bytes
    request_id: str
    priority: int
    after_step: int
    queue_timeout_s: float
    transfer_timeout_s: float


class PullBlocksOptions(PullTerms, EffectOptions, total=False):
    """Options of pull_blocks. With `wait`, give a longer `timeout_s`; `pull` does that by itself."""

    wait: TransferWait


class PullOptions(PullTerms, total=False):
    """Options of pull: `idempotency_key` as in ChangeOptions, `incarnation` as in OwnBlocksOptions, `have_tokens` as in
    pull_blocks.
    """

    idempotency_key: str
    have_tokens: int
    incarnation: int


class ReservationTerms(TypedDict, total=False):
    """Options of receive and reserve_blocks. `incarnation` as in OwnBlocksOptions."""

    incarnation: int
    request_id: str
    have_tokens: int
    use_tokens: int
    allow_prefix: bool
    after_step: int
    registration_timeout_s: float
    priority: int


class ReserveBlocksOptions(ReservationTerms, EffectOptions, total=False):
    """Options of reserve_blocks. With `wait`, give a longer `timeout_s`; `receive` does that by itself."""

    source: PeerAddress
    wait: TransferWait


class ReceiveOptions(ReservationTerms, total=False):
    """Options of receive. `idempotency_key` as in ChangeOptions."""

    idempotency_key: str


class LeaseOptions(ChangeOptions, total=False):
    """Options of lease."""

    incarnation: int
    ttl_s: float
    firm_ttl_s: float
    consumers: int
    on_abort: OnAbort.ValueType
    request_id: str
    transfer_key: bytes
    labels: dict[str, str]


class GrantLeaseOptions(LeaseOptions, EffectOptions, total=False):
    """Options of grant_lease."""

    tenant: str
    bound_to: str
    findable: bool


class CancelOptions(EffectOptions, total=False):
    """Options of cancel."""

    scope: CancelScope.ValueType
    free_allocation_ids: Sequence[str]


class WhichTransfers(TypedDict, total=False):
    """Filter of transfers: all given fields must match."""

    transfer_ids: Sequence[str]
    pair_id: str
    lease_id: str
    direction: Direction.ValueType
    request_id: str
    trace_id: str
    peer_engine_id: str
    states: list[TransferState.ValueType]
    memory: list[MemoryDisposition.ValueType]
    min_age_s: float


class ListOptions(CallOptions, total=False):
    """Options of calls that list. `limit` bounds the number of rows; without it all pages are fetched."""

    limit: int


class ListTransfersOptions(WhichTransfers, ListOptions, total=False):
    """Options of list_transfers."""


class RequestArrivedOptions(CallOptions, total=False):
    """Options of request_arrived. Without `incarnation` it is meant for the life that the scheduler knows."""

    target: Grant
    intent: Intent
    needs_all_outputs: bool
    traceparent: str
    incarnation: int


class BlockTableOptions(CallOptions, total=False):
    """Options of calls that list the blocks of a request. `incarnation` is the life that the ids belong to, if it is
    not the one that the scheduler knows.
    """

    dropped_blocks: list[int]
    incarnation: int


class BlocksAllocatedOptions(BlockTableOptions, total=False):
    """Options of blocks_allocated."""

    computed_tokens: int
    external_tokens: int
    after_step: int


class TokensComputedOptions(BlockTableOptions, total=False):
    """Options of tokens_computed and request_finished."""

    step: int


class Needed(CallOptions, total=False):
    """Options of blocks_needed."""

    request_time_us: int
    request_id: str


class ReadBlocksOptions(CallOptions, total=False):
    """Options of read_blocks."""

    incarnation: int
    layers: tuple[int, int]  # first layer, number of layers
