"""Protobuf messages made from their descriptors: random ones, and mutations of valid ones.

All choices come from one `Random`, so that a seed reproduces a message. Values are boundaries, values that break
parsers, and values that the server knows: ids, keys, grants and whole messages harvested from real calls. So a random
message gets further than the first check.
"""

from random import Random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvgrpc.peer.v1 import rank_pb2

Field = Any
"""A FieldDescriptor. Its two implementations have no common class."""
DEPTH_MAX = 6
"""Maximum depth of random messages. Mutations of deeper messages go deeper."""
MANY = 300
UNSIGNED = (0, 1, 2, 3, 15, 16, 17, 48, 511, 519, 520, 521, 65_536, 65_537, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
SIGNED = (0, 1, -1, 60, 999_999_999, 1_000_000_000, (1 << 31) - 1, -(1 << 31))
LONG = (315_576_000_000, 315_576_000_001, (1 << 63) - 1, -(1 << 63))
TEXTS = (
    "",
    "x",
    "0",
    "-1",
    "a" * 256,
    "a" * 257,
    "b" * 5000,
    "\0",
    "%s%n",
    "\N{PILE OF POO}" * 3,
    "../../etc",
    "\u202e",
)
_INTS = {
    FieldDescriptor.TYPE_UINT32: UNSIGNED,
    FieldDescriptor.TYPE_FIXED32: UNSIGNED,
    FieldDescriptor.TYPE_UINT64: (*UNSIGNED, 1 << 63, (1 << 64) - 1),
    FieldDescriptor.TYPE_FIXED64: (*UNSIGNED, 1 << 63, (1 << 64) - 1),
    FieldDescriptor.TYPE_INT32: SIGNED,
    FieldDescriptor.TYPE_INT64: (*SIGNED, *LONG),
}


class Known:
    """Values of real calls, by type."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.raw: list[bytes] = []
        self.messages: dict[str, list[Message]] = {}
        self.incarnations: list[int] = []

    def harvest(self, message: Message) -> None:
        """Adds all values that a message holds."""
        self.messages.setdefault(message.DESCRIPTOR.full_name, []).append(message)
        for field, value in message.ListFields():
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                continue
            for item in value if field.is_repeated else [value]:
                if isinstance(item, Message):
                    self.harvest(item)
                elif isinstance(item, str):
                    self.texts.append(item)
                elif isinstance(item, bytes):
                    self.raw.append(item)
                elif field.name == "incarnation":
                    self.incarnations.append(item)


class Maker:
    """Makes messages from one source of random choices."""

    def __init__(self, random: Random, known: Known) -> None:
        self._random = random
        self._known = known

    def any_of(self, descriptor: Descriptor) -> Message:
        """Returns a random message of this type."""
        return self._fill(GetMessageClass(descriptor)(), DEPTH_MAX)

    def mutated(self, valid: Message) -> Message:
        """Returns a copy with up to three mutated places, sometimes none."""
        made = type(valid)()
        made.CopyFrom(valid)
        for _ in range(self._random.choice((1, 1, 1, 2, 3, 0))):
            if places := _places(made):
                message, field = self._random.choice(places)
                self._random.choice((_clear, self._set, self._set, self._repeat))(message, field)
        return made

    def garbled(self, data: bytes) -> bytes:
        """Returns almost the same bytes: cut, flipped, doubled, or completely different."""
        random, made = self._random, bytearray(data)
        at = random.randrange(len(made) + 1)
        match random.randrange(6):
            case 0:
                del made[at:]
            case 1:
                made[at:at] = random.randbytes(random.choice((1, 3, 40)))
            case 2:
                made = made + made[at:]
            case 3:
                made = bytearray(random.randbytes(random.choice((1, 16, 500))))
            case _:
                for _ in range(3 if made else 0):
                    made[random.randrange(len(made))] ^= 1 << random.randrange(8)
        return bytes(made)

    # -- fields

    def _fill(self, message: Message, depth: int) -> Message:
        oneofs: Any = message.DESCRIPTOR.oneofs
        chosen = {oneof.name: self._random.choice(oneof.fields).name for oneof in oneofs}
        for field in message.DESCRIPTOR.fields:
            oneof = field.containing_oneof
            if self._random.random() < 0.6 and (oneof is None or chosen[oneof.name] == field.name):
                self._set(message, field, depth)
        return message

    def _set(self, message: Message, field: Field, depth: int = 2) -> None:
        """Sets a field to a new value."""
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            for _ in range(self._random.choice((1, 2, 17))):
                getattr(message, field.name)[self._text()] = self._text()
        elif field.is_repeated:
            rows = getattr(message, field.name)
            del rows[:]
            count = self._random.choice((0, 1, 1, 2, 3))
            rows.extend(self._message(kind, depth) if kind else self._scalar(field) for _ in range(count))
        elif kind is not None:
            getattr(message, field.name).CopyFrom(self._message(kind, depth))
        else:
            setattr(message, field.name, self._scalar(field))

    def _repeat(self, message: Message, field: Field) -> None:
        """Repeats the first rows once, or very often."""
        map_entry = field.message_type is not None and field.message_type.GetOptions().map_entry
        if not field.is_repeated or map_entry:
            self._set(message, field)
            return
        rows = getattr(message, field.name)
        rows.extend(list(rows)[:3] * self._random.choice((1, 1, MANY)))

    def _message(self, kind: Descriptor, depth: int) -> Message:
        seen = self._known.messages.get(kind.full_name)
        if seen and self._random.random() < 0.6:
            return self._random.choice(seen)
        made = GetMessageClass(kind)()
        return self._fill(made, depth - 1) if depth > 0 else made

    def _scalar(self, field: Field) -> Any:
        random = self._random
        if field.type == FieldDescriptor.TYPE_BOOL:
            return random.random() < 0.5
        if field.type == FieldDescriptor.TYPE_ENUM:
            return random.choice((*(value.number for value in field.enum_type.values), 99, -1))
        if field.type == FieldDescriptor.TYPE_STRING:
            return self._text()
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._bytes()
        if field.name == "incarnation" and self._known.incarnations and random.random() < 0.7:
            return random.choice(self._known.incarnations)
        return random.choice(_INTS[field.type])

    def _text(self) -> str:
        seen = self._known.texts
        return self._random.choice(seen if seen and self._random.random() < 0.6 else TEXTS)

    def _bytes(self) -> bytes:
        seen = self._known.raw
        if not seen or self._random.random() < 0.2:
            return self._random.randbytes(self._random.choice((0, 1, 15, 16, 64, 65, 256)))
        chosen = self._random.choice(seen)
        return chosen if self._random.random() < 0.7 else self.garbled(chosen)


def messages_of_a_rank(maker: Maker, random: Random, ticket: bytes) -> list[bytes]:
    """Returns messages of a rank on another host: mostly its introduction, and more."""
    made: list[Any] = [rank_pb2.ConnectRankRequest(ticket=ticket)]
    made += [maker.any_of(made[0].DESCRIPTOR) for _ in range(random.choice((0, 1, 1, 3)))]
    if random.random() < 0.3:
        made[0] = maker.mutated(made[0])
    bodies = [message.SerializeToString() for message in made]
    return [maker.garbled(body) if random.random() < 0.2 else body for body in bodies]


def _places(message: Message) -> list[tuple[Message, Field]]:
    """Returns every field of a message and of all messages that it holds."""
    found = [(message, field) for field in message.DESCRIPTOR.fields]
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for row in list(value)[:20] if field.is_repeated else [value]:
                found += _places(row)
    return found


def _clear(message: Message, field: Field) -> None:
    message.ClearField(field.name)
