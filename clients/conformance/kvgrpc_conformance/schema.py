"""Looks up the schema for cases: which methods exist, and whether a message of a case fits its type."""

from collections.abc import Iterator, Mapping
from functools import cache

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvgrpc.v1 import (
    admin_pb2,
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
from kvgrpc.wire.paths import ABOUT_ENGINES, is_field

from .matching import TEST_NAMES
from .values import Json, names_in

PACKAGE = "kvgrpc.v1"
_OF_KV = (handoff_pb2, lease_pb2, pool_pb2, tensor_pb2, transfer_pb2)
_FILES = (admin_pb2, fleet_pb2, handshake_pb2, scheduler_pb2, *_OF_KV)


@cache
def methods() -> dict[str, MethodDescriptor]:
    """Returns every RPC of kvgrpc.v1, by `kvgrpc.v1.Service/Method`."""
    services = [service for file in _FILES for service in file.DESCRIPTOR.services_by_name.values()]
    return {f"{service.full_name}/{method.name}": method for service in services for method in service.methods}


def full_name(method: str) -> str:
    """Returns the full name of a method. Cases may omit the package."""
    return method if "." in method else f"{PACKAGE}.{method}"


def reasons() -> list[str]:
    """Returns every reason of a failure, without its prefix."""
    names = [name.removeprefix("FAILURE_REASON_") for name in common_pb2.FailureReason.DESCRIPTOR.values_by_name]
    return [name for name in names if name != "UNSPECIFIED"]


def request(method: str, value: Json) -> Message:
    """Returns the request message of a method. Raises json_format.ParseError."""
    return parsed(methods()[method].input_type, value)


def reply(method: str, value: Json) -> Message:
    """Returns the reply message of a method. Raises json_format.ParseError."""
    return parsed(methods()[method].output_type, value)


def parsed(descriptor: Descriptor, value: Json) -> Message:
    """Returns a message from its JSON. Raises json_format.ParseError."""
    return json_format.ParseDict(value, GetMessageClass(descriptor)())


def request_faults(method: str, value: Json) -> Iterator[str]:
    """Yields what is impossible in a request, as far as that is known before its variables are."""
    yield from _faults(methods()[method].input_type, value, "request", expected=False)


def reply_faults(method: str, value: Json) -> Iterator[str]:
    """Yields what a case expects although its message does not have it."""
    yield from _faults(methods()[method].output_type, value, "reply", expected=True)


def unknown_paths(asked: Json, error: Json) -> list[str]:
    """Returns violations of an error that name no field of the refused request."""
    if not isinstance(error, Mapping) or asked.get("op") not in ("call", "open"):
        return []
    method, reason = asked["method"].rpartition("/")[2], error.get("reason", "")
    messages = [methods()[asked["method"]].input_type]
    if reason in ABOUT_ENGINES:
        messages.append(handshake_pb2.EngineDescription.DESCRIPTOR)
    if method == "PutTensor":  # a consumer that waits states what it expects, and the put is told
        messages.append(tensor_pb2.GetTensorRequest.DESCRIPTOR)
    paths = [violation["field"] for violation in error.get("violations", [])]
    return [
        f"error: {method}Request has no field {path}"
        for path in paths
        if not any(is_field(path, message) for message in messages)
    ]


def _faults(message: Descriptor, value: Json, where: str, *, expected: bool) -> Iterator[str]:
    if not isinstance(value, Mapping) or any(name.startswith("$") for name in value):
        if expected and isinstance(value, Mapping):
            yield from _unknown_tests(value, where)
        return
    if message.full_name.startswith("google.protobuf.") or message.GetOptions().map_entry:
        return
    fields = {field.json_name: field for field in message.fields}
    for name, item in value.items():
        if name not in fields:
            yield f"{where}.{name}: {message.name} has no such field"
        else:
            yield from _field_faults(message, fields[name], item, f"{where}.{name}", expected=expected)


def _field_faults(
    message: Descriptor, field: FieldDescriptor, value: Json, where: str, *, expected: bool
) -> Iterator[str]:
    rows = value if isinstance(value, list) else [value]
    if expected and isinstance(value, Mapping):
        rows = [value.get(name, value) for name in ("$has", "$all", "$none", "$not") if name in value] or [value]
    if isinstance(value, list) != field.is_repeated and not isinstance(value, str | Mapping):
        yield f"{where}: a list and its field, or neither, holds several"
    if field.message_type is not None:
        for row in rows:
            yield from _faults(field.message_type, row, where, expected=expected)
    elif field.enum_type is not None:
        known = field.enum_type.values_by_name
        for row in rows:
            if isinstance(row, str) and not row.startswith("$") and row not in known:
                yield f"{where}: {row} is no {field.enum_type.name}"
    elif not expected and not any(isinstance(row, Mapping) or names_in(row) for row in rows):
        try:
            parsed(message, {field.json_name: value})
        except json_format.ParseError as error:
            yield f"{where}: {error}"


def _unknown_tests(value: Mapping[str, Json], where: str) -> Iterator[str]:
    for name in value:
        if name not in TEST_NAMES and name.startswith("$"):
            yield f"{where}: no test is called {name}"
