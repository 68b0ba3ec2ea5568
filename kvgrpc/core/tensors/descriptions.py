"""Names, descriptions and contents of tensors, and the requests of callers that name them. Leases and accesses compare
the contents.

The content of a tensor is an opaque id of 32 bytes:

    SHA-256( lp("kvgrpc tensor v1")  lp(transfer_key)  lp(name)  u32(part)  lp(dtype)  u32(rank)  u64(shape[i]) ...
             u32(layer)  u64(nbytes)  lp(content_digest)  lp(weights_revision) )

where lp(x) is the field's length as a little-endian uint32 followed by its bytes, u32 and u64 are little-endian, and
layer is 2^32 - 1 where none is stated. The content of a bundle of n tensors, whose pages follow each other, is

    SHA-256( lp("kvgrpc tensors v1")  u32(n)  content[0] ... content[n - 1] )

with the contents of its tensors. Test vectors: proto/vectors/tensor.json.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property

from kvgrpc.core.values.content import OPAQUE_BYTES_MAX, ContentId
from kvgrpc.core.values.groups import ITEM_BYTES
from kvgrpc.core.values.ids import check_transfer_key
from kvgrpc.core.values.layout import BYTES_MAX, LAYERS_MAX
from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import FieldViolation, PreconditionFailed, Reason, invalid

NAME_BYTES_MAX = 256
DIMENSIONS_MAX = 16
"""Maximum number of dimensions of a shape."""
DTYPES = ITEM_BYTES | {"bool": 1, "complex64": 8, "complex128": 16}
"""Bytes of one element of each type, by numpy's or torch's name."""
_UINT32_END = 1 << 32
_NO_LAYER = _UINT32_END - 1
_DOMAIN = b"kvgrpc tensor v1"
_BUNDLE_DOMAIN = b"kvgrpc tensors v1"


@dataclass(frozen=True)
class TensorId:
    """The name of one tensor of a request."""

    key: bytes
    """The request's transfer key."""
    name: str
    part: int = 0
    """Number of this part of a tensor that comes in several, such as the chunks of a prompt."""

    def __post_init__(self) -> None:
        check_transfer_key(self.key, "tensor.transfer_key")
        if not self.name or len(self.name) > NAME_BYTES_MAX or len(self.name.encode()) > NAME_BYTES_MAX:
            raise invalid("tensor.name", f"is required, and has at most {NAME_BYTES_MAX} bytes")
        if not 0 <= self.part < _UINT32_END:
            raise invalid("tensor.part", "is a number from 0 to 2^32 - 1")


@dataclass(frozen=True)
class Description:
    """The type and size of a tensor. Its elements lie side by side, the last dimension fastest."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    layer: int | None = None
    content_digest: bytes = b""
    """Digest of the prompt from which it was computed. Empty where the engine does not state it."""

    def __post_init__(self) -> None:
        item = DTYPES.get(self.dtype)
        if item is None:
            raise invalid("description.dtype", f"{self.dtype[:32]!r} is not one of {', '.join(DTYPES)}")
        if self.layer is not None and not 0 <= self.layer < LAYERS_MAX:
            raise invalid("description.layer", f"is a number below {LAYERS_MAX}")
        if len(self.content_digest) > OPAQUE_BYTES_MAX:
            raise invalid("description.content_digest", f"has at most {OPAQUE_BYTES_MAX} bytes")
        if len(self.shape) > DIMENSIONS_MAX:
            raise invalid("description.shape_sizes", f"has at most {DIMENSIONS_MAX} dimensions")
        nbytes = item
        for size in self.shape:
            if size < 1:
                raise invalid("description.shape_sizes", "each dimension is at least 1: an empty tensor is not moved")
            nbytes *= size
            if nbytes > BYTES_MAX:
                raise invalid("description.shape_sizes", f"is of more than {BYTES_MAX} bytes")
        if nbytes != self.nbytes:
            raise invalid("description.nbytes", f"is {self.nbytes}; {self.dtype} of this shape has {nbytes}")


@dataclass(frozen=True)
class ExpectedTensor:
    """Facts that a consumer knows beforehand about a tensor. None for unknown ones."""

    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    layer: int | None = None
    content_digest: bytes | None = None

    def check(self, found: Description) -> None:
        """Raises PreconditionFailed (CONTENT_MISMATCH) with the fields in which the tensor differs."""
        wrong = tuple(
            FieldViolation(f"expected.{_SCHEMA_NAMES.get(field.name, field.name)}",
                           f"is {_shown(getattr(self, field.name))} where it is asked for, "
                           f"and {_shown(getattr(found, field.name))} at its source")
            for field in fields(self)
            if getattr(self, field.name) not in (None, getattr(found, field.name))
        )  # fmt: skip
        if wrong:
            raise PreconditionFailed(
                Reason.CONTENT_MISMATCH, "the tensor is not the one that is asked for", violations=wrong
            )


ANY = ExpectedTensor()
"""The expectation of a consumer that knows nothing."""


@dataclass(frozen=True)
class NamedTensor:
    """A tensor's name and description."""

    id: TensorId
    described: Description


def content_of(tensors: Sequence[NamedTensor], weights: str, page_count: int) -> ContentId:
    """Returns the content of a lease on all pages of a tensor or bundle. `weights` is the revision that the engine of
    either side states.
    """
    opaque = [_opaque(tensor.id, tensor.described, weights) for tensor in tensors]
    if len(opaque) == 1:
        return ContentId(page_count, opaque=opaque[0])
    domain = struct.pack("<I", len(_BUNDLE_DOMAIN)) + _BUNDLE_DOMAIN
    whole = hashlib.sha256(domain + struct.pack("<I", len(opaque)) + b"".join(opaque))
    return ContentId(page_count, opaque=whole.digest())


def _opaque(id_: TensorId, described: Description, weights: str) -> bytes:
    texts = (_DOMAIN, id_.key, id_.name.encode(), described.dtype.encode(), described.content_digest, weights.encode())
    domain, key, name, dtype, digest, revision = [struct.pack("<I", len(text)) + text for text in texts]
    shape = struct.pack(f"<I{len(described.shape)}Q", len(described.shape), *described.shape)
    layer = struct.pack("<IQ", _NO_LAYER if described.layer is None else described.layer, described.nbytes)
    part = struct.pack("<I", id_.part)
    return hashlib.sha256(domain + key + name + part + dtype + shape + layer + digest + revision).digest()


_SCHEMA_NAMES = {"shape": "shape_sizes"}
"""Field name here -> field name in the schema, where they differ."""


def _shown(value: object) -> str:
    return value.hex() or "not stated" if isinstance(value, bytes) else str(value)


CONSUMERS_MAX = 64
"""Maximum number of consumers to which one call sends a tensor."""


@dataclass(frozen=True)
class LeadAddress:
    """Another engine's lead."""

    address: str
    engine_id: str = ""
    """The engine that must be there. Empty for any."""


@dataclass(frozen=True)
class Put:
    """A tensor put at its source, in the pages of an allocation. At another engine: a tensor or a bundle, put by a READ
    grant.
    """

    id: TensorId
    described: Description
    allocation_id: str = ""
    token: bytes = b""
    consumers: tuple[LeadAddress, ...] = ()
    consumer_count: int = 1
    ttl_s: float | None = None
    timeout_s: float | None = None
    asynchronous: bool = False
    request_id: str = ""
    bundled: tuple[NamedTensor, ...] = ()
    """Further tensors of the bundle, whose pages follow."""
    tenant: str = ""
    """Tenant of the tensors. Empty for the house."""

    @cached_property
    def tensors(self) -> tuple[NamedTensor, ...]:
        return (NamedTensor(self.id, self.described), *self.bundled)


@dataclass(frozen=True)
class WantedTensor:
    """A tensor that is wanted."""

    id: TensorId
    expected: ExpectedTensor = ANY


@dataclass(frozen=True)
class Get:
    """A tensor that is wanted. A request to its source may name several."""

    id: TensorId
    expected: ExpectedTensor
    source: LeadAddress | None = None
    as_offer: bool = False
    timeout_s: float | None = None
    request_id: str = ""
    bundled: tuple[WantedTensor, ...] = ()
    """Further tensors. Those that may come with the first one do."""
    most_pages: int = 0
    """Maximum number of pages of all these tensors."""
    tenant: str = ""
    """Tenant for which it is wanted. Empty for the house."""

    @property
    def wanted(self) -> tuple[WantedTensor, ...]:
        return (WantedTensor(self.id, self.expected), *self.bundled)


@dataclass(frozen=True)
class Release:
    """Tensors that are wanted no more, or without names all tensors of the request."""

    key: bytes
    names: tuple[TensorId, ...] = ()
    source: LeadAddress | None = None
    """The lead that keeps them for this engine."""
    tenant: str = ""
    """Tenant for which they are released. Empty for the house."""
