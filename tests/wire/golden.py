"""Messages of the public packages with every field set, as bytes and as JSON: proto/vectors/messages.json.

`python -m tests.wire.golden` adds cases that the schema has and the file lacks; existing cases stay unchanged.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor, FileDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvgrpc.v1 import (
    admin_pb2,
    common_pb2,
    handoff_pb2,
    handshake_pb2,
    lease_pb2,
    pool_pb2,
    pool_types_pb2,
    scheduler_pb2,
    tensor_pb2,
    transfer_pb2,
)

PUBLIC: list[FileDescriptor] = [
    module.DESCRIPTOR
    for module in (
        admin_pb2, common_pb2, handoff_pb2, handshake_pb2, lease_pb2, pool_pb2, pool_types_pb2, scheduler_pb2,
        tensor_pb2, transfer_pb2,
    )
]  # fmt: skip
VECTORS = Path(__file__).parents[2] / "proto" / "vectors" / "messages.json"
DEPTH = 3
"""Maximum depth of nested messages; some messages contain themselves."""


def examples(files: list[Any]) -> Iterator[tuple[str, Message]]:
    """Yields (name, message) for each message and for each choice of its oneofs."""
    for file in files:
        for descriptor in file.message_types_by_name.values():
            yield descriptor.full_name, filled(descriptor, {})
            for oneof in descriptor.oneofs:
                for field in oneof.fields[1:]:
                    yield f"{descriptor.full_name} {field.name}", filled(descriptor, {oneof.name: field.name})


def filled(descriptor: Any, chosen: dict[str, str], depth: int = DEPTH) -> Message:
    """Makes a message with every field set; of a oneof the chosen field, by default the first."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        oneof = field.containing_oneof
        if oneof is not None and field.name != chosen.get(oneof.name, oneof.fields[0].name):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            number = field.message_type.fields_by_name["value"].cpp_type != FieldDescriptor.CPPTYPE_STRING
            getattr(message, field.name)["key"] = field.number if number else "value"
        elif field.message_type is not None:
            if depth:
                value = filled(field.message_type, {}, depth - 1)
                target = getattr(message, field.name)
                if field.is_repeated:
                    target.append(value)
                else:
                    target.CopyFrom(value)
        elif field.is_repeated:
            getattr(message, field.name).extend([scalar(field), scalar(field)])
        else:
            setattr(message, field.name, scalar(field))
    return message


def scalar(field: Any) -> Any:
    """Returns a value that no other field of the message has, where its type allows that."""
    if field.containing_type.full_name == "google.protobuf.Duration":
        return field.number
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return field.name.encode() if field.type == FieldDescriptor.TYPE_BYTES else field.name
        case FieldDescriptor.CPPTYPE_BOOL:
            return True
        case FieldDescriptor.CPPTYPE_ENUM:
            return field.enum_type.values[-1].number
        case FieldDescriptor.CPPTYPE_INT64 | FieldDescriptor.CPPTYPE_UINT64:
            return 2**53 - field.number
        case _:
            return field.number


def row(name: str, message: Message) -> dict[str, Any]:
    data = message.SerializeToString(deterministic=True).hex()
    return {"name": name, "message": data, "json": MessageToDict(message)}


def main() -> None:
    known = json.loads(VECTORS.read_text())["cases"] if VECTORS.exists() else []
    names = {case["name"] for case in known}
    added = [row(name, message) for name, message in examples(PUBLIC) if name not in names]
    about = "Messages of the public schema with every field set when they were made, in hex and in JSON."
    VECTORS.write_text(json.dumps({"about": about, "cases": [*known, *added]}, indent=1) + "\n")
    sys.stdout.write(f"{len(added)} added, {len(known)} kept\n")


if __name__ == "__main__":
    main()
