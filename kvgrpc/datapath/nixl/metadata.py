"""A NIXL agent's metadata: sealed for its way to a peer, and read without NIXL, to be checked before use.

NIXL and UCX trust metadata: a wrong memory type is read as an index, an address of another version makes UCX stop the
process, and other bytes of an address may make it fault (found by changing bytes at random). The digest keeps out
damaged metadata, and the checks keep out contradictions. UCX's own parts, address and keys, cannot be checked: a peer
that the handshake let in is trusted with them.

The form is NIXL 1.5's: fields of (tag, length in 8 bytes, value, "|"), little-endian.
"""

import hashlib
import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvgrpc.core.values.endpoints import MemoryKind, NixlEndpoint, Segment

_log = logging.getLogger(__name__)

BYTES_MAX = 1 << 20
"""Maximum size of metadata in bytes: about 100 bytes a segment are normal."""
ADDRESSES_END = 1 << 62
"""Exclusive bound of addresses and sizes, which are added up in 64-bit integers."""

_DIGEST_BYTES = 32
_MAGIC = b"nixlSerDes|"
_LENGTH = struct.Struct("<Q")
_TYPE = struct.Struct("<I")
_DESCRIPTOR = struct.Struct("<QQQ")
# NIXL's nixl_mem_t.
_TYPES = {MemoryKind.HOST: 0, MemoryKind.PINNED_HOST: 0, MemoryKind.CUDA: 1}


@dataclass(frozen=True)
class Metadata:
    """The metadata of one agent with one backend."""

    agent: str
    backend: str
    address: bytes
    """Address in the backend's own form."""
    registered: tuple[tuple[int, int, int, int], ...]
    """Rows (memory type, address, bytes, device)."""


def seal(blob: bytes) -> bytes:
    """Returns metadata with its digest in front."""
    return hashlib.sha256(blob).digest() + blob


def unseal(sealed: bytes) -> bytes:
    """Returns metadata without its digest. Raises ValueError unless it is intact."""
    digest, blob = sealed[:_DIGEST_BYTES], sealed[_DIGEST_BYTES:]
    if len(blob) > BYTES_MAX or hashlib.sha256(blob).digest() != digest:
        raise ValueError(f"its {len(blob)} bytes are not those that were sent")
    return blob


def form_is_known(own: NixlEndpoint) -> bool:
    """Returns True if metadata can be checked here, because this NIXL writes its own as expected."""
    try:
        check(own, own)
    except ValueError as error:
        _log.warning("this NIXL writes metadata in a new form, so that of peers is not checked: %s", error)
        return False
    return True


def check(peer: NixlEndpoint, own: NixlEndpoint) -> None:
    """Raises ValueError unless the metadata is intact, of this form, and matches the endpoint.

    `own` is an endpoint of this process, whose version of addresses the peer's must have.
    """
    check_segments(peer.segments)
    metadata = parse(unseal(peer.metadata))
    said = (metadata.agent, metadata.backend, sorted(metadata.registered))
    if said != (peer.agent, peer.backend, sorted(_registration(s) for s in peer.segments)):
        raise ValueError("it is not of that agent and memory")
    if metadata.address[:1] != parse(unseal(own.metadata)).address[:1]:
        raise ValueError("its addresses are of another version of the backend")


def check_segments(segments: Sequence[Segment]) -> None:
    """Raises ValueError unless there is memory and its addresses can be added up."""
    if not segments:
        raise ValueError("it has no memory")
    for segment in segments:
        end = segment.address + segment.nbytes
        if segment.address < 0 or segment.nbytes <= 0 or end >= ADDRESSES_END or segment.device < 0:
            raise ValueError(f"{segment} is not memory")
    if sum(segment.nbytes for segment in segments) >= ADDRESSES_END:
        raise ValueError("its memory is larger than can be counted")


def parse(blob: bytes) -> Metadata:
    """Reads metadata. Raises ValueError for anything but the metadata of an agent with one backend."""
    if not blob.startswith(_MAGIC):
        raise ValueError("it does not begin like metadata")
    fields = _Fields(blob)
    agent = fields.text(b"Agent")
    if fields.number(b"Conns") != 1:
        raise ValueError("it has not one backend")
    backend, address = fields.text(b"t"), fields.value(b"c")
    if fields.value(b"") != b"MemSection":
        raise ValueError("it has no memory section")
    registered = []
    for _ in range(fields.number(b"nixlSecElms")):
        if fields.text(b"bknd") != backend or fields.value(b"nixlDList") != b"nixlSDList":
            raise ValueError("it has memory of another backend")
        registered += fields.descriptors()
    if not fields.at_end() and fields.number(b"UserMDs"):  # later versions write it
        raise ValueError("it has data of an application")
    if not fields.at_end():
        raise ValueError("it has more than is known here")
    return Metadata(agent, backend, address, tuple(registered))


class _Fields:
    def __init__(self, blob: bytes) -> None:
        self._blob = blob
        self._at = len(_MAGIC)

    def value(self, tag: bytes) -> bytes:
        begin = self._at + len(tag) + _LENGTH.size
        if begin > len(self._blob) or not self._blob.startswith(tag, self._at):
            raise ValueError(f"no field {tag!r} at byte {self._at}")
        end = begin + int(_LENGTH.unpack_from(self._blob, begin - _LENGTH.size)[0])
        if self._blob[end : end + 1] != b"|":
            raise ValueError(f"field {tag!r} at byte {self._at} does not end")
        self._at = end + 1
        return self._blob[begin:end]

    def text(self, tag: bytes) -> str:
        return self.value(tag).decode("ascii")

    def number(self, tag: bytes, form: struct.Struct = _LENGTH) -> int:
        value = self.value(tag)
        if len(value) != form.size:
            raise ValueError(f"field {tag!r} has {len(value)} bytes")
        return int(form.unpack(value)[0])

    def descriptors(self) -> list[tuple[int, int, int, int]]:
        """Reads one list. After each descriptor comes the backend's own key, of any form."""
        memory_type = self.number(b"t", _TYPE)
        found = []
        for _ in range(self.number(b"n")):
            value = self.value(b"")
            if len(value) <= _DESCRIPTOR.size:
                raise ValueError("memory without a key")
            found.append((memory_type, *_DESCRIPTOR.unpack_from(value)))
        return found

    def at_end(self) -> bool:
        return self._at == len(self._blob)


def _registration(segment: Segment) -> tuple[int, int, int, int]:
    return _TYPES[segment.kind], segment.address, segment.nbytes, segment.device
