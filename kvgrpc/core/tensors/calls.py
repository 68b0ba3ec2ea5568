"""What callers ask of a lead's tensors."""

from dataclasses import dataclass

from kvgrpc.core.tensors.values import Description, Expected, TensorId

CONSUMERS_MAX = 64
"""That one call sends a tensor to."""


@dataclass(frozen=True)
class LeadAddress:
    """Another engine's lead."""

    address: str
    engine_id: str = ""
    """The engine that must be there; empty: any."""


@dataclass(frozen=True)
class Put:
    """A tensor, at its source in the pages of an allocation, or at another engine by a READ grant."""

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


@dataclass(frozen=True)
class Get:
    """A tensor that is wanted."""

    id: TensorId
    expected: Expected
    source: LeadAddress | None = None
    as_offer: bool = False
    timeout_s: float | None = None
    request_id: str = ""


@dataclass(frozen=True)
class Release:
    """Tensors that are wanted no more; without names all of the request."""

    key: bytes
    names: tuple[TensorId, ...] = ()
    source: LeadAddress | None = None
    """Who keeps them for this engine."""
