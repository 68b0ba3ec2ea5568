"""Messages that programs of earlier releases send, as bytes and as JSON: those of the public packages in
proto/vectors/messages.json, those between leads in tests/wire/peers.json.

    python -m tests.wire.golden            adds cases that the schema has and a file lacks; others stay as they are
    python -m tests.wire.golden --anew     writes all cases anew, which only a schema that nobody uses yet allows

A case says since which release it is kept.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import any_pb2
from google.protobuf.descriptor import FieldDescriptor, FileDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

import kvgrpc
from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import (
    admin_pb2,
    calls_pb2,
    common_pb2,
    fleet_pb2,
    handoff_pb2,
    handshake_pb2,
    lease_pb2,
    pool_pb2,
    pool_types_pb2,
    scheduler_pb2,
    tensor_pb2,
    transfer_pb2,
)
from tests.wire.spoken import SPOKEN

PUBLIC: list[FileDescriptor] = [
    module.DESCRIPTOR
    for module in (
        admin_pb2, calls_pb2, common_pb2, fleet_pb2, handoff_pb2, handshake_pb2, lease_pb2, pool_pb2, pool_types_pb2,
        scheduler_pb2, tensor_pb2, transfer_pb2,
    )
]  # fmt: skip
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
    if isinstance(message, any_pb2.Any):
        message.Pack(Duration(seconds=1))
        return message
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


def _between_leads() -> Iterator[tuple[str, Message]]:
    yield from examples([peer_pb2.DESCRIPTOR])
    for case in SPOKEN:
        message = case.make()
        yield f"{message.DESCRIPTOR.full_name} {case.name}", message


@dataclass(frozen=True)
class Golden:
    """A file of kept messages."""

    path: Path
    about: str
    make: Callable[[], Iterator[tuple[str, Message]]]
    """Returns the names and messages of today's schema."""

    def cases(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.path.read_text())["cases"] if self.path.exists() else []
        return found

    def write(self, *, anew: bool) -> str:
        """Writes the cases that are missing, or all of them. Returns what was done."""
        known = [] if anew else self.cases()
        names = {case["name"] for case in known}
        added = [_row(name, message) for name, message in self.make() if name not in names]
        self.path.write_text(json.dumps({"about": self.about, "cases": [*known, *added]}, indent=1) + "\n")
        return f"{self.path.name}: {len(added)} added, {len(known)} kept"


PUBLIC_CASES = Golden(
    Path(__file__).parents[2] / "proto" / "vectors" / "messages.json",
    "Messages of the public schema with every field set when they were made, in hex and in JSON.",
    lambda: examples(PUBLIC),
)
PEER_CASES = Golden(
    Path(__file__).with_name("peers.json"),
    "Messages between leads, in hex and in JSON: with every field set when they were made, and as a lead writes them.",
    _between_leads,
)


def _row(name: str, message: Message) -> dict[str, Any]:
    data = message.SerializeToString(deterministic=True).hex()
    return {"name": name, "since": kvgrpc.__version__, "message": data, "json": MessageToDict(message)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anew", action="store_true", help="write all cases anew")
    anew = parser.parse_args().anew
    for golden in (PUBLIC_CASES, PEER_CASES):
        sys.stdout.write(golden.write(anew=anew) + "\n")


if __name__ == "__main__":
    main()
