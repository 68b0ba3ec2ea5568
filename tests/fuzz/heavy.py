"""Heavy messages, made from their descriptors: a valid message in which one field is as full as possible.

They are written as bytes, because a field may occur twice in a message: appended bytes merge into the valid message,
and everything else in it stays valid. Nested rows share the size. Every field of every message is filled in its turn,
also fields that a later schema adds.
"""

from collections.abc import Iterator
from functools import cache, lru_cache
from random import Random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from tests.fuzz.messages import Field, Known

MESSAGE_BYTES_MAX = 4_194_304
ROOM_BYTES = 2_048
"""Room for what surrounds the field, in bytes."""
SIZES = (200, 1_000, 4_000, 30_000, 60_000, 300_000, 1_000_000, 2_000_000, MESSAGE_BYTES_MAX - ROOM_BYTES)
COUNTS = (1, 1, 2, 64, 255, 256, 1_024, 4_096, 16_384, 65_536, 1 << 22)
"""Numbers of rows around the full field: as many as bounds allow, and one more than some allow."""
NUMBERS = (
    0, 1, 2, 16, 64, 255, 519, 520, 520, 4_096, 16_384, 65_535, 65_536, 65_536, 65_536, 65_537, 1 << 20, 1 << 24,
    (1 << 31) - 1, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1,
)  # fmt: skip
LENGTHS = range(520, 65_537)
"""Lengths of one run, from the pool's 520 blocks to the admitted maximum."""
AMPLIFIED_BLOCKS, AMPLIFIED_ROWS, AMPLIFIED_BYTES = 65_000, 64, 60_000
_VARINT, _FIXED64, _BYTES, _GROUP, _GROUP_END, _FIXED32 = range(6)
_FIXED = {
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_SFIXED32: 4,
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_DOUBLE: 8,
}
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
_UNKNOWN = 15_000
"""Number of a field that no message has."""

Place = tuple[Field, ...]
"""A field, preceded by the fields of the messages that contain it."""


@cache
def places(descriptor: Descriptor) -> tuple[Place, ...]:
    """Returns every field of a message and of all messages in it. Recursive messages are entered once."""
    return tuple(_places(descriptor, ()))


def _places(descriptor: Descriptor, outside: Place) -> Iterator[Place]:
    for field in descriptor.fields:
        yield (*outside, field)
        inner = field.message_type
        if inner is not None and not _is_map(field) and all(inner != above.message_type for above in outside):
            yield from _places(inner, (*outside, field))


def runs(descriptor: Descriptor) -> list[Place]:
    """Returns the places where a message names blocks: repeated numbers with equally long numbers beside them."""
    return [place for place in places(descriptor) if len(beside := _beside(place[-1])) > 1 and beside[0] is place[-1]]


class Heavy:
    """Makes heavy messages from one source of random choices."""

    def __init__(self, random: Random, known: Known) -> None:
        self._random, self._known = random, known

    def body(self, descriptor: Descriptor, valid: Message | None) -> bytes:
        """Returns the bytes of a valid message in which one field, at any depth, is full."""
        base = b"" if valid is None else valid.SerializeToString()
        size = max(self._random.choice(SIZES) - len(base), ROOM_BYTES)
        anywhere = places(descriptor)
        if not anywhere or self._random.random() < 0.05:
            return base + self._unknown(size)
        (place,) = self._random.choices(anywhere, [len(place) * len(_beside(place[-1])) for place in anywhere])
        made = base + self._within(place, valid, size)
        while len(made) > MESSAGE_BYTES_MAX:  # a row around the field may be long
            size //= 2
            made = base + self._within(place, valid, size)
        return made

    def amplified(self, place: Place, valid: Message | None) -> bytes:
        """Returns a small message that names many blocks: nested rows up to a place of runs, with a long run in
        each.
        """
        field, inside = place[0], place[1:]
        if not inside:
            first, *others = _beside(field)
            return _tagged(first, b"\0") + b"".join(
                _tagged(other, _number(other, AMPLIFIED_BLOCKS)) for other in others
            )
        row = self._row(field, valid)
        whole = _tagged(field, (b"" if row is None else row.SerializeToString()) + self.amplified(inside, row))
        rows = min(AMPLIFIED_ROWS, AMPLIFIED_BYTES // len(whole)) if field.is_repeated and len(inside) > 2 else 1
        return whole * max(1, rows)

    def _within(self, place: Place, valid: Message | None, size: int) -> bytes:
        """Returns bytes that fill the field at a place when they are appended to a valid message."""
        field, inside = place[0], place[1:]
        row = self._row(field, valid)
        if not inside:
            return self._full(field, row, size)
        base = b"" if row is None else row.SerializeToString()
        if not field.is_repeated:
            # These bytes merge into the message that is there; if none is there, start from a known one.
            there = valid is not None and valid.HasField(field.name)
            return _tagged(field, (b"" if there else base) + self._within(inside, row, size))
        count = min(self._random.choice(COUNTS), size // (len(base) + 8) + 1)
        whole = _tagged(field, base + self._within(inside, row, max(size // count - len(base), 1)))
        return whole * min(count, size // len(whole) + 1)

    def _full(self, field: Field, row: Message | None, size: int) -> bytes:
        """Returns as much of one field as fits into `size` bytes."""
        if _is_map(field):
            return _map(field, min(size // 12, self._random.choice(COUNTS)))
        if field.message_type is not None:
            whole = b"" if row is None or self._random.random() < 0.4 else row.SerializeToString()
            if not field.is_repeated:
                return _tagged(field, whole + self._unknown(size))
            one = _tagged(field, whole or self._first_scalar(field.message_type))
            return one * min(size // len(one), self._random.choice(COUNTS))
        if field.type in _TEXTS:
            return self._texts(field, size)
        return self._numbers(field, size)

    def _texts(self, field: Field, size: int) -> bytes:
        if not field.is_repeated:
            return _tagged(field, self._random.choice((b"a", b"\0", b"\xc2\x80", b"%")) * (size // 2))
        count, nbytes = min(size // 2, self._random.choice(COUNTS)), self._random.choice((0, 1, 8, 64, size))
        if nbytes == 8:
            return b"".join(_tagged(field, b"%08d" % i) for i in range(min(count, size // 11, 1 << 16)))
        one = _tagged(field, b"x" * nbytes)
        return one * max(1, min(count, size // len(one)))

    def _numbers(self, field: Field, size: int) -> bytes:
        """Returns one extreme number, or many that are equal, ascend, or match the numbers of the fields beside it."""
        random, value = self._random, self._random.choice(NUMBERS)
        if not field.is_repeated:
            return _tag(field, _wire_type(field)) + _number(field, value)
        chosen = _beside(field) if random.random() < 0.7 else [field]
        value = LENGTHS[-1] if len(chosen) > 1 and random.random() < 0.4 else value
        few = len(chosen) > 1 and value in LENGTHS  # one long run names as many blocks
        count = min(1 if few else random.choice(COUNTS), size // (len(chosen) * len(_number(field, value))) or 1)
        if random.random() < 0.5:  # the first field ascends, like starts of runs
            count = min(count, size // (4 + len(chosen))) or 1
            first = _tagged(chosen[0], _ascending(chosen[0], count, random.choice((1, 2, value % 65_536 + 1))))
            return first + b"".join(_tagged(other, _number(other, value) * count) for other in chosen[1:])
        if random.random() < 0.2:  # not packed, like old writers
            one = _tag(field, _wire_type(field)) + _number(field, value)
            return one * max(1, min(count, size // len(one)))
        return b"".join(_tagged(other, _number(other, value) * count) for other in chosen)

    def _unknown(self, size: int) -> bytes:
        """Returns fields that the message does not have."""
        kind = self._random.choice((_VARINT, _BYTES, _GROUP))
        tag = _varint(_UNKNOWN << 3 | kind)
        if kind == _GROUP:
            deep = self._random.choice((50, 99, 100, 10_000))
            one = tag * deep + _varint(_UNKNOWN << 3 | _GROUP_END) * deep
            return one * max(1, size // len(one))
        if kind == _BYTES and self._random.random() < 0.5:
            return tag + _varint(size) + b"x" * size
        return (tag + b"\0") * (size // (len(tag) + 1))

    def _first_scalar(self, descriptor: Descriptor) -> bytes:
        """Returns a row that is empty or nearly empty."""
        for field in descriptor.fields if self._random.random() < 0.5 else ():
            if field.message_type is None:
                return (
                    _tagged(field, b"x") if field.type in _TEXTS else _tag(field, _wire_type(field)) + _number(field, 1)
                )
        return b""

    def _row(self, field: Field, valid: Message | None) -> Message | None:
        """Returns a valid message for a field: from the surrounding valid message, or any known one."""
        if field.message_type is None or _is_map(field):
            return None
        if valid is not None:
            if field.is_repeated:
                if there := getattr(valid, field.name):
                    found: Message = self._random.choice(there)
                    return found
            elif valid.HasField(field.name):
                return getattr(valid, field.name)  # type: ignore[no-any-return]
        seen = self._known.messages.get(field.message_type.full_name)
        return self._random.choice(seen) if seen else None


@cache
def _beside(field: Field) -> list[Field]:
    """Returns the field, with all repeated numbers beside it if it is one: they must be equally long."""
    if not field.is_repeated or not _is_number(field):
        return [field]
    return [other for other in field.containing_type.fields if other.is_repeated and _is_number(other)]


def _is_map(field: Field) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _is_number(field: Field) -> bool:
    return field.message_type is None and field.type not in _TEXTS


def _map(field: Field, count: int) -> bytes:
    """Returns distinct entries of a map from text to text."""
    entries = (b"\x0a\x06%06d\x12\x01x" % i for i in range(count))
    return b"".join(_tagged(field, entry) for entry in entries)


def _wire_type(field: Field) -> int:
    return {4: _FIXED32, 8: _FIXED64}[_FIXED[field.type]] if field.type in _FIXED else _VARINT


def _tag(field: Field, wire_type: int) -> bytes:
    return _varint(field.number << 3 | wire_type)


def _tagged(field: Field, data: bytes) -> bytes:
    return _tag(field, _BYTES) + _varint(len(data)) + data


def _number(field: Any, value: int) -> bytes:
    if field.type in _FIXED:
        nbytes = _FIXED[field.type]
        return (value % (1 << 8 * nbytes)).to_bytes(nbytes, "little")
    if field.type == FieldDescriptor.TYPE_ENUM:
        value %= 1 << 31
    return _varint(value)


@lru_cache(64)
def _ascending(field: Any, count: int, step: int) -> bytes:
    return b"".join(_number(field, i * step) for i in range(count))


def _varint(value: int) -> bytes:
    made = bytearray()
    while value >= 0x80:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)
