"""Every field of every message from outside has bounds, which are checked before the message is converted."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from kvgrpc.errors import InvalidRequest, OutOfRange, Reason
from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.session.v1 import session_pb2
from kvgrpc.v1 import (
    admin_pb2,
    calls_pb2,
    common_pb2,
    fleet_pb2,
    handoff_pb2,
    handshake_pb2,
    lease_pb2,
    pool_pb2,
    scheduler_pb2,
    tensor_pb2,
    transfer_pb2,
)
from kvgrpc.wire.fields import TABLE, Bound, BoundKind, Budget, bounds_of, check

FILES = (
    admin_pb2, calls_pb2, fleet_pb2, handoff_pb2, handshake_pb2, lease_pb2, pool_pb2, scheduler_pb2, tensor_pb2,
    transfer_pb2, peer_pb2,
)  # fmt: skip
REPLIES = (
    peer_pb2.ConverseResponse, handshake_pb2.HandshakeResponse, lease_pb2.RenewLeasesResponse,
    tensor_pb2.PutTensorResponse, tensor_pb2.GetTensorResponse, tensor_pb2.ReleaseTensorsResponse,
)  # fmt: skip
"""Answers of other leads that are read. RegisterPushResponse is not one: only its arrival counts."""


def roots() -> Iterator[Any]:
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield method.input_type
    yield session_pb2.ClientFrame.DESCRIPTOR
    for reply in REPLIES:
        yield reply.DESCRIPTOR


def fields() -> dict[str, Any]:
    """Returns all fields of all messages from outside, and of the messages in them."""
    found: dict[str, Any] = {}
    todo = list(roots())
    while todo:
        for field in todo.pop().fields:
            if field.full_name not in found:
                found[field.full_name] = field
                if field.message_type is not None:
                    todo.append(field.message_type)
    return found


FIELDS = fields()
NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64, FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT,
}  # fmt: skip
BOUNDED = {
    name: field
    for name, field in FIELDS.items()
    if field.is_repeated or field.cpp_type in NUMBERS or field.cpp_type == FieldDescriptor.CPPTYPE_STRING
}


def test_each_list_text_and_number_has_a_bound() -> None:
    unbounded = [name for name, field in BOUNDED.items() if not bounds(field)]
    assert unbounded == []


def bounds(field: Any) -> tuple[Bound, ...]:
    """Returns the rows of a field, or nothing."""
    with suppress(LookupError):
        return bounds_of(field)
    return ()


def test_each_name_in_the_table_is_that_of_a_field() -> None:
    known = {field.name for field in BOUNDED.values()}
    known |= {f"{field.containing_type.name}.{field.name}" for field in BOUNDED.values()}
    assert {name for row in TABLE for name in row.fields.split()} <= known


def too_much() -> Iterator[tuple[Any, Bound]]:
    for field in BOUNDED.values():
        entry = field.containing_type.GetOptions().map_entry
        for row in bounds(field):
            unsigned = field.cpp_type == FieldDescriptor.CPPTYPE_UINT32 and row.most >= 1 << 32
            signed = field.cpp_type == FieldDescriptor.CPPTYPE_INT32 and row.kind is BoundKind.NUMBER
            if row.kind not in (BoundKind.FREE, BoundKind.CUT) and not (entry or unsigned or signed):
                yield field, row


def overfull(field: Any, row: Bound) -> Any:
    """Returns a message with one more in the field than its bound."""
    message: Any = GetMessageClass(field.containing_type)()
    match row.kind:
        case BoundKind.BLOCKS:
            message.counts.append(row.most + 1)
        case BoundKind.ROWS if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for number in range(row.most + 1):
                getattr(message, field.name)[str(number)] = ""
        case BoundKind.ROWS if field.message_type is None and field.cpp_type != FieldDescriptor.CPPTYPE_STRING:
            getattr(message, field.name).extend([0] * (row.most + 1))
        case BoundKind.ROWS:
            data = field.number << 3 | 2
            tag = bytes([data]) if data < 128 else bytes([data & 127 | 128, data >> 7])
            message.MergeFromString((tag + b"\0") * (row.most + 1))
        case BoundKind.BYTES:
            text = "x" * (row.most + 1)
            value = text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
            if field.is_repeated:
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)
        case _:
            setattr(message, field.name, row.most + 1)
    return message


def test_more_than_a_field_may_hold_is_refused_by_its_name(subtests: pytest.Subtests) -> None:
    for field, row in too_much():
        with subtests.test(f"{field.full_name} {row.kind.name}"):
            with pytest.raises(
                OutOfRange if row.kind in (BoundKind.ROWS, BoundKind.BLOCKS) else InvalidRequest
            ) as refused:
                check(overfull(field, row))
            assert refused.value.reason in (Reason.INVALID_FIELD, Reason.LIMIT_EXCEEDED)
            assert [violation.field for violation in refused.value.violations] in ([field.name], [""])


def test_rows_are_counted_over_all_places_of_a_message() -> None:
    part = peer_pb2.ReadyPart(blocks=[common_pb2.GroupBlocks()] * 256)
    request = peer_pb2.OpenAccessRequest(openings=[peer_pb2.AccessOpening(parts=[part] * 129)] * 2)
    with pytest.raises(OutOfRange) as refused:
        check(request)
    assert [violation.field for violation in refused.value.violations] == ["openings.parts.blocks"]


def test_blocks_are_counted_over_all_lists_of_a_message() -> None:
    whole = common_pb2.GroupBlocks(runs=common_pb2.BlockRuns(starts=[0], counts=[65_536]))
    row = peer_pb2.AccessOpening(parts=[peer_pb2.ReadyPart(blocks=[whole])])
    check(peer_pb2.OpenAccessRequest(openings=[row] * 16))
    with pytest.raises(OutOfRange) as refused:
        check(peer_pb2.OpenAccessRequest(openings=[row] * 17))
    assert [violation.field for violation in refused.value.violations] == ["openings.parts.blocks"]


def test_the_calls_of_a_step_share_one_budget() -> None:
    whole = common_pb2.GroupBlocks(runs=common_pb2.BlockRuns(starts=[0], counts=[1 << 19]))
    call = scheduler_pb2.ScheduleCall(
        tokens_computed=scheduler_pb2.TokensComputedRequest(blocks=common_pb2.Blocks(groups=[whole]))
    )
    budget = Budget()
    budget.take(call)
    budget.take(call)
    with pytest.raises(OutOfRange):
        budget.take(call)


def test_labels_are_texts_on_both_sides() -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(lease_pb2.GrantLeaseRequest(labels={"k": "x" * 257}))
    assert [violation.field for violation in refused.value.violations] == ["labels"]
