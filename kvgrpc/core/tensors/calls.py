"""What callers ask of a lead's tensors."""

from dataclasses import dataclass

from kvgrpc.core.tensors.values import ANY, Description, Expected, Named, TensorId

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
    """A tensor, at its source in the pages of an allocation; at another engine one, or a bundle, by a READ grant."""

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
    bundled: tuple[Named, ...] = ()
    """Further tensors, whose pages follow."""

    @property
    def tensors(self) -> tuple[Named, ...]:
        """All of them."""
        return (Named(self.id, self.described), *self.bundled)


@dataclass(frozen=True)
class Wanted:
    """A tensor that is wanted."""

    id: TensorId
    expected: Expected = ANY


@dataclass(frozen=True)
class Get:
    """A tensor that is wanted; of its source also several."""

    id: TensorId
    expected: Expected
    source: LeadAddress | None = None
    as_offer: bool = False
    timeout_s: float | None = None
    request_id: str = ""
    bundled: tuple[Wanted, ...] = ()
    """Further ones, of which those come with it that may."""
    most_pages: int = 0
    """Of all of them."""

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        """All of them."""
        return (Wanted(self.id, self.expected), *self.bundled)


@dataclass(frozen=True)
class Release:
    """Tensors that are wanted no more; without names all of the request."""

    key: bytes
    names: tuple[TensorId, ...] = ()
    source: LeadAddress | None = None
    """Who keeps them for this engine."""
