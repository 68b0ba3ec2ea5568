"""Requests of callers about a lead's tensors."""

from functools import cached_property

from kvgrpc.core.tensors.descriptions import ANY, Description, ExpectedTensor, NamedTensor, TensorId
from kvgrpc.core.values.records import dataclass

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
        """All tensors of the put."""
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
        """All tensors of the request."""
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
