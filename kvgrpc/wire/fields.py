"""Bounds of the fields of messages from outside: one table, checked before anything is made of a message.

Every field needs a row here: `bounds_of` raises for a field without one, and a test finds it. Bounds that depend on
settings, the pool or the caller are checked later, by the conversions and by the core.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from kvgrpc.core.tensors.bundles import TENSORS_MAX
from kvgrpc.core.tensors.descriptions import DIMENSIONS_MAX
from kvgrpc.core.values.ids import PROOFS_MAX
from kvgrpc.core.values.layout import BYTES_MAX, LAYERS_MAX
from kvgrpc.core.values.parts import BATCH_PARTS
from kvgrpc.errors import NOTE_BYTES_MAX, OutOfRange, invalid, too_many
from kvgrpc.wire import bounds
from kvgrpc.wire.bounds import blocks_named

INTEGER_MAX = 2**53 - 1
"""Largest integer that every language can hold, also one whose only number is a double."""
Field = Any
"""Type of a FieldDescriptor. There are two classes of descriptors, without a common base."""
_Path = tuple[Any, str] | None
"""Position of a message within the whole one: the path of its parent, and its field there."""


class BoundKind(Enum):
    """The quantity of a field that is bounded."""

    ROWS = "rows in a message"
    BLOCKS = "blocks in a message"
    BYTES = "bytes"
    CUT = "bytes; what is longer is cut, or left out"
    NUMBER = "at most"
    FREE = "any: it is compared, or clamped"


_ASPECTS = {
    BoundKind.ROWS: "rows",
    BoundKind.BLOCKS: "rows",
    BoundKind.BYTES: "text",
    BoundKind.CUT: "text",
    BoundKind.NUMBER: "number",
    BoundKind.FREE: "number",
}


@dataclass(frozen=True)
class Bound:
    """One row of the table."""

    kind: BoundKind
    most: int
    fields: str
    """Names of fields, as `field` of any message or as `Message.field`, which takes precedence."""

    @property
    def says(self) -> str:
        """Error text for one value."""
        return f"has at most {self.most} bytes" if self.kind is BoundKind.BYTES else f"is at most {self.most}"


_RESULTS = "OpenAccessResponse.results SettleAccessResponse.results CloseAccessResponse.results"
TABLE: tuple[Bound, ...] = (
    Bound(BoundKind.ROWS, bounds.ROWS_MAX, f"openings settlings closings {_RESULTS}"),
    Bound(
        BoundKind.ROWS,
        bounds.CALLS_MAX,
        "ConverseRequest.calls StreamCallsRequest.calls cancelled_call_ids answers ScheduleRequest.calls",
    ),
    Bound(BoundKind.ROWS, bounds.FRAME_ROWS_MAX, "CallBatch.calls reports"),
    Bound(BoundKind.ROWS, BATCH_PARTS, "parts"),
    Bound(BoundKind.ROWS, bounds.RANGES_MAX, "layers_done data_paths ChecksumBlocksRequest.blocks"),
    Bound(BoundKind.ROWS, bounds.BLOCK_ROWS_MAX, "blocks Blocks.groups dropped_block_counts known_block_counts"),
    Bound(BoundKind.ROWS, bounds.RUNS_MAX, "starts"),
    Bound(BoundKind.BLOCKS, bounds.BLOCKS_MAX, "counts"),
    Bound(BoundKind.ROWS, bounds.GROUPS_MAX, "groups group_block_counts"),
    Bound(BoundKind.ROWS, bounds.REGIONS_MAX, "regions"),
    Bound(BoundKind.ROWS, bounds.SEGMENTS_MAX, "segments spans CudaVmmEndpoint.allocations"),
    Bound(BoundKind.ROWS, bounds.ENDPOINTS_MAX, "endpoints ranks"),
    Bound(BoundKind.ROWS, bounds.IDS_MAX, "transfer_ids leases reading_access_ids"),
    Bound(BoundKind.ROWS, bounds.SEND_RUNS_MAX, "offsets nbytes"),
    Bound(BoundKind.ROWS, bounds.SEND_VALUES_MAX, "PostSendRequest.values PostSendResponse.values"),
    Bound(BoundKind.ROWS, bounds.TOKENS_MAX, "token_ids values"),
    Bound(BoundKind.ROWS, bounds.ITEMS_MAX, "multimodal_items"),
    Bound(
        BoundKind.ROWS,
        bounds.NAMES_MAX,
        "features required_features states memory_dispositions labels rejected free_allocation_ids consumers "
        "state_sections details excluded_engine_ids",
    ),
    Bound(BoundKind.ROWS, bounds.DIFFERENCES_MAX, "differences"),
    Bound(BoundKind.ROWS, bounds.CALLS_MAX, "ReleaseTensorsRequest.names"),
    Bound(BoundKind.ROWS, TENSORS_MAX, "bundled_tensors"),
    Bound(BoundKind.ROWS, DIMENSIONS_MAX * TENSORS_MAX, "shape_sizes"),
    Bound(BoundKind.ROWS, PROOFS_MAX, "proofs"),
    Bound(
        BoundKind.BYTES,
        bounds.TEXT_BYTES_MAX,
        "request_id idempotency_key transfer_id transfer_ids lease_id allocation_id address engine_id "
        "expected_engine_id peer_engine_id weights_revision trace_id pair_id name dtype space backend agent "
        "socket_path fingerprint data_path code peer posting_id key value page_token free_allocation_ids method "
        "peer_address unavailable_reason label type_url tenant bound_to model_name model_digest layout_digest "
        "after_revision excluded_engine_ids",
    ),
    Bound(BoundKind.BYTES, bounds.SALT_BYTES_MAX, "adapter cache_salt"),
    Bound(
        BoundKind.BYTES,
        bounds.SECRET_BYTES_MAX,
        "GroupValue.value access_id reverse_access_id reading_access_ids token digest opaque_id transfer_key nonce "
        "ticket rank_ticket content_digest device_uuid proof proofs",
    ),
    Bound(BoundKind.BYTES, bounds.METADATA_BYTES_MAX, "metadata"),
    Bound(BoundKind.BYTES, bounds.DETAIL_BYTES_MAX, "Any.value"),
    Bound(BoundKind.BYTES, bounds.DIGESTS_BYTES_MAX, "digests prefix_digests"),
    Bound(BoundKind.BYTES, bounds.MESSAGE_BYTES_MAX, "UnaryCall.request"),
    Bound(
        BoundKind.CUT, NOTE_BYTES_MAX, "message why not_at_rest field here there traceparent StartDrainRequest.reason"
    ),
    Bound(
        BoundKind.NUMBER,
        BYTES_MAX,
        "offset stride_bytes block_bytes total_bytes nonce_offset nbytes size_bytes moved_bytes layer_bytes "
        "values_bytes head_bytes token_bytes key_element_bytes",
    ),
    Bound(BoundKind.NUMBER, bounds.ADDRESS_MAX, "Segment.address"),
    Bound(BoundKind.NUMBER, LAYERS_MAX, "Group.layer_count"),
    Bound(
        BoundKind.NUMBER,
        INTEGER_MAX,
        "after_step step after_seq after_event_seq read_events event_seq attempt incarnation call_id "
        "cancelled_call_ids sequence released_count source_released_count "
        "request_time_us after_offer_seq",
    ),
    Bound(
        BoundKind.FREE,
        0,
        "seconds nanos rank source_rank peer_rank world_size device void_slot group block count first number part "
        "part_epoch epoch framing "
        "priority consumer_count done_consumer_count page_size token_count opaque_tokens offer_tokens use_tokens "
        "have_tokens "
        "computed_tokens external_tokens memory_generation protocol protocol_min protocol_max block_count length "
        "MultimodalItem.offset Region.layer_count first_layer block_tokens kv_head_count head_dim window_tokens "
        "total_kv_head_count stage layer shape_sizes page_count page_count_max allocation message_bytes code",
    ),
)
_BY_NAME = {(_ASPECTS[row.kind], name): row for row in TABLE for name in row.fields.split()}


def bounds_of(field: Field) -> tuple[Bound, ...]:
    """Returns the rows of a field. Raises LookupError for a repeated field, text, bytes or number without a row."""
    return tuple(_bound(field, aspect) for aspect in _aspects(field))


class Budget:
    """The counts that one message may hold, or several that count as one: a step of calls."""

    def __init__(self) -> None:
        self._spent: dict[Field, int] = {}

    def take(self, message: Message) -> None:
        """Counts a message, without the calls of a batch, which are counted one by one.

        Raises InvalidRequest (INVALID_FIELD) for a long text or a number out of range, OutOfRange (LIMIT_EXCEEDED) for
        too many rows or blocks.
        """
        check(message, self._spent)


def check(  # noqa: C901 - one case for each kind of field
    message: Message, spent: dict[Field, int] | None = None, path: _Path = None
) -> None:
    """Checks one message, by itself or with the rows `spent` of the message that contains it at `path`. Raises what
    `Budget.take` raises.
    """
    spent = {} if spent is None else spent
    for field, value in message.ListFields():
        plan = _plan(field)
        if (row := plan.rows) is not None:
            count = spent.get(field, 0) + (len(value) if row.kind is BoundKind.ROWS else blocks_named(value))
            spent[field] = count
            if count > row.most:
                raise _too_many(field, row, count, path)
        if plan.bytes_max:
            # A character has at most four bytes, so most texts need no encoding.
            if len(value) * 4 > plan.bytes_max and _bytes(value) > plan.bytes_max:
                raise invalid(_name((path, plan.name)), plan.most)
        elif plan.number_max:
            if not -plan.number_max <= value <= plan.number_max:
                raise invalid(_name((path, plan.name)), plan.most)
        elif plan.fits is not None:
            if not plan.fits(value):
                raise invalid(_name((path, plan.name)), plan.most)
        elif plan.one:
            check(value, spent, (path, plan.name))
        elif plan.many:
            for one in value:
                check(one, spent, (path, plan.name))


def _too_many(field: Field, row: Bound, count: int, path: _Path) -> OutOfRange:
    # Errors about runs name the list that contains them.
    name = _name((path, field.name) if row.kind is BoundKind.ROWS else path and path[0])
    return too_many(f"{name} has {count} {row.kind.value}; the limit is {row.most}", row.most, name, row.kind.value)


@dataclass(frozen=True)
class _FieldPlan:
    """The checks of a field that is set."""

    name: str
    rows: Bound | None = None
    bytes_max: int = 0
    """Maximum bytes of a single text; 0 for other fields."""
    number_max: int = 0
    """Maximum amount of a single number; 0 for other fields."""
    fits: Callable[[Any], bool] | None = None
    """Predicate for a field's other value, or for all its values."""
    most: str = ""
    """Error text for a value that is too much."""
    one: bool = False
    """True for a single message whose fields are checked, too."""
    many: bool = False


@cache
def _plan(field: Field) -> _FieldPlan:
    found = {_ASPECTS[row.kind]: row for row in bounds_of(field)}
    rows = found.get("rows")
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        side = _bound(kind.fields_by_name["value"], "text")
        fits = _fits(side)
        assert fits is not None
        return _FieldPlan(
            field.name,
            rows,
            fits=lambda pairs: all(fits(text) for pair in pairs.items() for text in pair),
            most=side.says,
        )
    if kind is not None:
        batch = field.name == "calls"
        inside = _bounded(kind)
        return _FieldPlan(
            field.name, rows, one=inside and not field.is_repeated, many=inside and field.is_repeated and not batch
        )
    element = found.get("text") or found.get("number")
    one = _fits(element) if element is not None else None
    if element is None or one is None:
        return _FieldPlan(field.name, rows)
    if element.kind is BoundKind.BYTES and not field.is_repeated:
        return _FieldPlan(field.name, rows, element.most, most=element.says)
    if element.kind is BoundKind.NUMBER and not field.is_repeated:
        return _FieldPlan(field.name, rows, number_max=element.most, most=element.says)
    return _FieldPlan(
        field.name, rows, fits=(lambda values: all(map(one, values))) if field.is_repeated else one, most=element.says
    )


@cache
def _bounded(kind: Descriptor) -> bool:
    """Returns True if a field of a message type has a bound, at any depth. A Duration has none."""
    plans = [_plan(field) for field in kind.fields]
    return any(plan.rows or plan.bytes_max or plan.number_max or plan.fits or plan.one or plan.many for plan in plans)


def _fits(row: Bound) -> Callable[[Any], bool] | None:
    """Returns the predicate for one value, or None if no value is refused."""
    most = row.most
    if row.kind is BoundKind.BYTES:
        return lambda value: len(value) * 4 <= most or _bytes(value) <= most
    if row.kind is BoundKind.NUMBER:
        return lambda value: -most <= value <= most
    return None


def _bytes(value: str | bytes) -> int:
    return len(value.encode() if isinstance(value, str) else value)


def _name(path: _Path) -> str:
    found = []
    while path is not None:
        path, name = path
        found.append(name)
    return ".".join(reversed(found))


def _aspects(field: Field) -> Iterator[str]:
    if field.is_repeated:
        yield "rows"
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        yield "text"
    elif field.cpp_type in _NUMBERS and not field.is_repeated:
        yield "number"


def _bound(field: Field, aspect: str) -> Bound:
    own, shared = (aspect, f"{field.containing_type.name}.{field.name}"), (aspect, field.name)
    row = _BY_NAME.get(own) or _BY_NAME.get(shared)
    if row is None:
        raise LookupError(f"{field.full_name} has no bound on its {aspect}")
    return row


_NUMBERS = frozenset(
    {
        FieldDescriptor.CPPTYPE_INT32,
        FieldDescriptor.CPPTYPE_INT64,
        FieldDescriptor.CPPTYPE_UINT32,
        FieldDescriptor.CPPTYPE_UINT64,
        FieldDescriptor.CPPTYPE_DOUBLE,
        FieldDescriptor.CPPTYPE_FLOAT,
    }
)
