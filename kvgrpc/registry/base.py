"""The interface of all registries."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from kvgrpc.errors import Reason, Unavailable


@dataclass(frozen=True)
class RegistryListing:
    """All entries there are, as (key, value, revision)."""

    entries: tuple[tuple[str, bytes, int], ...]


@dataclass(frozen=True)
class EntryChanged:
    """One entry is new, or has another value."""

    key: str
    value: bytes
    revision: int


@dataclass(frozen=True)
class EntryRemoved:
    """One entry has gone."""

    key: str
    revision: int


RegistryNews = RegistryListing | EntryChanged | EntryRemoved


class Registry(Protocol):
    """A source of entries."""

    def watch(self) -> AsyncIterator[RegistryNews]:
        """Tells a listing, then changes. It ends by RegistryDown when the registry breaks off: then watch again."""
        ...

    async def close(self) -> None:
        """Gives back connections."""
        ...


class RegistryDown(Unavailable):
    """The registry does not answer, or its watch broke off."""


def down(what: object) -> RegistryDown:
    """Returns the error for a registry that does not answer."""
    return RegistryDown(Reason.PEER_UNREACHABLE, f"the registry does not answer: {what}")
