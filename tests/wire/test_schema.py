"""Rules for the whole schema that no linter knows, against names and numbers that break in some languages."""

import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from kvgrpc.peer.v1 import peer_pb2, rank_pb2 as peer_rank_pb2
from kvgrpc.session.v1 import rank_pb2, session_pb2
from kvgrpc.wire.fields import INTEGER_MAX, BoundKind, bounds_of
from tests.wire.golden import PUBLIC

ALL = [*PUBLIC, *(module.DESCRIPTOR for module in (peer_pb2, peer_rank_pb2, rank_pb2, session_pb2))]
LONG = {FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_INT64}
MEASURES = {"block_tokens", "use_tokens", "have_tokens", "computed_tokens", "external_tokens", "prompt_tokens"}
"""Fields measured in tokens, a unit: they say how far, not how many things."""
NO_PLURAL = {"layers_done", "news", "bytes_by_kind"}
"""Lists whose plural is not at the end, or whose name is a plural already."""
THIRD_PARTY = Path(__file__).parents[2] / "third_party" / "proto"


def messages(files: list[FileDescriptor]) -> Iterator[Any]:
    for file in files:
        yield from file.message_types_by_name.values()


def fields(files: list[FileDescriptor]) -> dict[str, Any]:
    return {field.full_name: field for message in messages(files) for field in message.fields}


def test_lists_have_plural_names() -> None:
    lists = [name for name, field in fields(PUBLIC).items() if field.is_repeated]
    assert [name for name in lists if not name.endswith("s") and name.rpartition(".")[2] not in NO_PLURAL] == []


def test_how_many_there_are_is_called_a_count() -> None:
    numbers = [f for f in fields(PUBLIC).values() if not f.is_repeated and f.cpp_type == FieldDescriptor.CPPTYPE_UINT32]
    plural = [f for f in numbers if f.name.endswith("s") and not f.name.endswith(("_bytes", "_tokens", "address"))]
    assert [f.full_name for f in plural if f.name not in MEASURES] == [], "numbers: ..._count?"


def test_no_number_of_64_bits_may_pass_what_a_double_holds() -> None:
    long = {name: field for name, field in fields(ALL).items() if field.type in LONG}
    wide = [name for name, field in long.items() if not field.is_repeated and most(field) > INTEGER_MAX]
    assert wide == []
    lists = [name for name, field in long.items() if field.is_repeated]
    postings = ("kvgrpc.session.", "kvgrpc.peer.v1.PostSendRequest.")
    ids = "kvgrpc.v1.StreamCallsRequest.cancelled_call_ids"
    others = [name for name in lists if name != ids and not name.startswith(postings)]
    assert others == [], "only offsets of a posting, and ids that are bounded where a call states its own"


def most(field: Any) -> float:
    """Returns the bound of a number, or 0 for one that no caller sets: the table of bounds lacks it."""
    try:
        rows = bounds_of(field)
    except LookupError:
        return 0
    return max((row.most for row in rows if row.kind is BoundKind.NUMBER), default=math.inf)


def test_no_oneof_has_the_name_of_a_message() -> None:
    names = {message.full_name for message in messages(ALL)}
    for message in messages(ALL):
        for oneof in message.oneofs:
            camel = "".join(part.title() for part in oneof.name.split("_"))
            assert f"{message.file.package}.{camel}" not in names, oneof.full_name


def test_constants_that_java_makes_of_enums_do_not_collide() -> None:
    for enum in (enum for file in ALL for enum in file.enum_types_by_name.values()):
        names = {value.name for value in enum.values}
        assert not names & {f"{name}_VALUE" for name in names}, enum.full_name


def test_every_mutating_request_can_be_validated_only() -> None:
    for message in messages(PUBLIC):
        if "idempotency_key" in message.fields_by_name:
            assert "validate_only" in message.fields_by_name, message.full_name


def test_blocks_are_named_by_one_message_wherever_a_caller_names_them() -> None:
    rows = {name: field.message_type for name, field in fields(PUBLIC).items()}
    named = {name for name, kind in rows.items() if kind is not None and kind.name == "GroupBlocks"}
    assert named == {"kvgrpc.v1.Blocks.groups"}


def test_a_number_that_was_given_up_is_reserved_with_its_name() -> None:
    """The rule of common.proto: nothing is removed without a trace."""
    for file in sorted((Path(__file__).parents[2] / "proto").rglob("*.proto")):
        text = file.read_text()
        for body in re.findall(r"^ +reserved ([^;]+);", text, re.MULTILINE):
            assert re.fullmatch(r'(\d+|"\w+")(, (\d+|"\w+"))*', body), f"{file.name}: reserved {body}"
        by_number, by_name = (re.findall(rf"^ +reserved {kind}", text, re.MULTILINE) for kind in (r"\d", '"'))
        assert len(by_number) == len(by_name), file.name


def test_definitions_of_others_are_those_that_this_server_speaks(tmp_path: Path) -> None:
    out = tmp_path / "descriptors"
    files = [str(path.relative_to(THIRD_PARTY)) for path in THIRD_PARTY.rglob("*.proto")]
    assert len(files) == 4
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{THIRD_PARTY}", f"--descriptor_set_out={out}", *files]
    subprocess.run(protoc, check=True, timeout=60)
    (read,) = (file for file in FileDescriptorSet.FromString(out.read_bytes()).file if file.package == "grpc.health.v1")
    theirs = FileDescriptorProto()
    health_pb2.DESCRIPTOR.CopyToProto(theirs)
    assert [shape(message) for message in read.message_type] == [shape(message) for message in theirs.message_type]
    calls = [sorted(map(shape, file.service[0].method)) for file in (read, theirs)]
    assert calls[0] == calls[1]


def shape(part: Message) -> str:
    """Returns the text of a definition without the JSON names, which protoc adds."""
    return re.sub(r"^ *json_name: .*\n", "", str(part), flags=re.MULTILINE)
