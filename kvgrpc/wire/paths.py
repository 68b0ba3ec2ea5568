"""Paths of fields in errors: from the root of the refused request, by the schema's names.

Checks of a nested message do not know its place in the request: `digests` of a content, `blocks` of a hand-over. The
whole path is found here, where the request is known.
"""

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvgrpc.core.values.obstacles import SCHEMA_NAMES
from kvgrpc.errors import FieldViolation, KVGrpcError, Reason

LOOKED_AT_MAX = 1_000
"""Maximum number of messages searched per request. An error in a later message keeps the shorter path."""
ABOUT_ENGINES = frozenset({Reason.INCOMPATIBLE_POOLS, Reason.PROTOCOL_UNSUPPORTED, Reason.WEIGHTS_MISMATCH})
"""Reasons whose fields are those of EngineDescription."""
_USUAL = {"content": "Content", "tensor": "TensorName"}
"""Messages that checks name by their usual field, even if the request has another name for the field."""
_STEP = re.compile(r"([a-z0-9_]+)(?:\[\d+\])?")
_Error = TypeVar("_Error", bound=KVGrpcError)


def placed(error: _Error, request: object) -> _Error:
    """Returns the error with paths from the root of the request. Paths that are not in the request stay unchanged, and
    so do those of ABOUT_ENGINES: they are paths in the engines' descriptions.
    """
    if error.violations and error.reason not in ABOUT_ENGINES and isinstance(request, Message):
        error.violations = tuple(replace(row, field=_from_root(row.field, request)) for row in error.violations)
    return error


def in_schema(violations: tuple[FieldViolation, ...], pool: str) -> tuple[FieldViolation, ...]:
    """Renames a layout's violations to the schema's names. `pool` is the path of its description."""
    return tuple(replace(row, field=f"{pool}.{_renamed(row.field)}") for row in violations)


def is_field(path: str, message: Any) -> bool:
    """Returns True if messages of that descriptor have a field, or a oneof, at that path."""
    at = message
    for step in path.split("."):
        named = _STEP.fullmatch(step)
        if at is None or named is None:
            return False
        name = named[1]
        field = at.fields_by_name.get(name)
        if field is None:
            return name in at.oneofs_by_name and path.endswith(name)
        at = field.message_type
    return True


def _from_root(path: str, request: Message) -> str:
    for prefix, message in _messages(request):
        if is_field(path, message.DESCRIPTOR):
            return prefix + path
    usual, _, rest = path.partition(".")
    for prefix, message in _messages(request) if usual in _USUAL else ():
        if message.DESCRIPTOR.name == _USUAL[usual] and is_field(rest, message.DESCRIPTOR):
            return prefix + rest
    return path


def _messages(request: Message) -> Iterator[tuple[str, Message]]:
    """Yields the messages that a request holds, the outermost first, each with the prefix of paths in it."""
    left, seen = deque([("", request)]), 0
    while left and seen < LOOKED_AT_MAX:
        prefix, message = left.popleft()
        seen += 1
        yield prefix, message
        for field, value in message.ListFields():
            if field.message_type is None or field.message_type.GetOptions().map_entry:
                continue
            if field.is_repeated:
                left.extend((f"{prefix}{field.name}[{i}].", row) for i, row in enumerate(value[:LOOKED_AT_MAX]))
            else:
                left.append((f"{prefix}{field.name}.", value))


def _renamed(path: str) -> str:
    head, dot, name = path.rpartition(".")
    return f"{head}{dot}{SCHEMA_NAMES.get(name, name)}"
