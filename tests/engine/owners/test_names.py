"""Every request field that names a thing has a row with who may use the thing, and a stranger tries it."""

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

import kvgrpc.peer.v1
import kvgrpc.v1
from kvgrpc.v1 import common_pb2
from tests.engine.owners import names
from tests.engine.owners.victims import EVERY_ATTACK, Victim

STREAMED = frozenset({"v1.KeepAliveRequest.sequence"})
"""Fields that their own caller counts, and that are only returned to it."""


def fields_of(found: Descriptor, seen: set[Descriptor]) -> Iterator[str]:
    """Yields the fields of a message and its submessages that may name something."""
    if found in seen or found.full_name.startswith("google."):
        return
    seen.add(found)
    for field in found.fields:
        if field.message_type is not None:
            yield from fields_of(field.message_type, seen)
        elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES) or field.name in names.NUMBERS:
            yield f"{found.full_name}.{field.name}".removeprefix("kvgrpc.")


def named_in_requests() -> set[str]:
    """Returns the fields that may name something, of all requests of all services."""
    seen: set[Descriptor] = set()
    found: set[str] = set()
    for package in (kvgrpc.v1, kvgrpc.peer.v1):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if module.name.endswith("_pb2"):
                services = importlib.import_module(module.name).DESCRIPTOR.services_by_name.values()
                for method in (method for service in services for method in service.methods):
                    found.update(fields_of(method.input_type, seen))
    return {name for name in found if not name.startswith(names.RANK_REPORTS)} - STREAMED


def test_every_field_that_may_name_a_thing_has_a_row() -> None:
    assert named_in_requests() == set(names.NAMES) | names.LABELS
    assert not set(names.NAMES) & names.LABELS


class Recorder:
    """A stand-in for a stub that records the requests."""

    def __init__(self) -> None:
        self.fields: set[str] = set()

    def __getattr__(self, _: str) -> "Recorder":
        return self

    def __call__(self, request: Any, **_: Any) -> Any:
        for message in request if isinstance(request, Iterator) else [request]:
            self._see(message)
        return iter([None])

    def _see(self, message: Message) -> None:
        for field, value in message.ListFields():
            self.fields.add(f"{message.DESCRIPTOR.full_name}.{field.name}".removeprefix("kvgrpc."))
            if field.message_type is not None and not field.message_type.full_name.startswith("google."):
                for row in value if field.is_repeated else [value]:
                    self._see(row)


@pytest.mark.parametrize("word", [names.OWNER, names.SCHEDULER, names.ID])
def test_every_field_for_which_a_word_is_asked_is_tried_by_a_stranger(word: str) -> None:
    recorder = Recorder()
    victim = Victim(recorder, 1, "b-1", (1, 2), "t-1", common_pb2.Grant(token=b"g"), b"k" * 16)  # type: ignore[arg-type]
    for attack in EVERY_ATTACK:
        attack(victim)
    assert {name for name, asked in names.NAMES.items() if asked == word} - recorder.fields == set()
