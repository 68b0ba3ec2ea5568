"""Hypothesis strategies for any message of a class: every field may be unset, and enums may have unknown values."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from kvgrpc.errors import KVGrpcError

_Made = TypeVar("_Made")
_DEPTH_MAX = 4
_INTEGERS = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_FIXED32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_ENUM: (-3, 100),
}


def outcome(call: Callable[[], _Made]) -> _Made | KVGrpcError:
    """Returns the result of a call, or its typed refusal; any other exception is a defect and is raised."""
    try:
        return call()
    except KVGrpcError as error:
        return error


def messages(kind: type[Message]) -> st.SearchStrategy[Any]:
    """Returns a strategy for messages of that class."""
    return _message(kind.DESCRIPTOR, _DEPTH_MAX)


@functools.cache
def _message(descriptor: Descriptor, depth: int) -> st.SearchStrategy[Any]:
    made = GetMessageClass(descriptor)
    fields = {field.name: _field(field, depth) for field in descriptor.fields if depth or not field.message_type}
    return st.fixed_dictionaries({}, optional=fields).map(lambda values: made(**values))


def _field(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type and field.message_type.GetOptions().map_entry:
        return st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)
    one = _value(field, depth)
    return st.lists(one, max_size=3) if field.is_repeated else one


def _value(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.type in _INTEGERS:
        low, high = _INTEGERS[field.type]
        small = st.integers(max(low, -2), 20)
        return small | st.integers(low, high)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_STRING:
        return st.text(max_size=20) | st.text(min_size=300, max_size=320)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=40) | st.binary(min_size=16, max_size=16)
    assert field.message_type is not None, field.full_name
    return st.deferred(lambda: _message(field.message_type, depth - 1))
