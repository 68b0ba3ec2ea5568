"""The entry that an engine publishes of itself. A registry may hold anything, so a read entry is checked."""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from kvgrpc.errors import invalid

ENTRY_BYTES_MAX = 2_048
"""Maximum size of an entry as it is published, in bytes."""
TEXT_BYTES_MAX = 256
"""Maximum size of a text of an entry, in bytes."""
ITEMS_MAX = 8
"""Maximum number of addresses, and of data paths, of an entry."""
NUMBER_MAX = (1 << 53) - 1
"""Maximum of an incarnation and of a life: the largest integer that every language can hold."""


class EngineRole(StrEnum):
    """Purpose of an engine."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """One life of one engine, as its lead publishes it. What changes often is not in it."""

    engine_id: str
    addresses: tuple[str, ...]
    """Addresses (host:port) of the lead, best first."""
    incarnation: int = 0
    """Random name of the life; 0: unknown, as in a list that a person wrote."""
    life: int = 0
    """Number that is greater in each later life of an engine id."""
    role: EngineRole = EngineRole.BOTH
    model: str = ""
    """Digest of what the model is; only engines with equal ones exchange KV."""
    layout: str = ""
    """Digest of what the pools' layouts must have in common."""
    data_paths: tuple[str, ...] = ()
    host: str = ""
    """Name of the host, a hint that two engines are on the same one."""
    tenant: str = ""
    """Tenant that the engine serves; empty: all."""
    draining: bool = False
    """True when the engine takes no new work."""
    version: str = ""
    model_name: str = ""
    """Name of the model, for people and for filters."""

    @property
    def order(self) -> tuple[int, int]:
        """The place of this life among those of its engine id: the greatest is the newest."""
        return self.life, self.incarnation

    def to_json(self) -> bytes:
        """Returns the entry as it is published. Raises InvalidRequest for an entry that nobody would read."""
        data = json.dumps(asdict(self), separators=(",", ":")).encode()
        read_entry(data)
        return data


def read_entry(data: bytes) -> EngineEntry:
    """Returns a published entry. Unknown keys are left out. Raises InvalidRequest."""
    if len(data) > ENTRY_BYTES_MAX:
        raise invalid("entry", f"has at most {ENTRY_BYTES_MAX} bytes, not {len(data)}")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise invalid("entry", f"is not JSON: {error}") from error
    return entry_of(found)


def entry_of(found: Any) -> EngineEntry:
    """Returns the entry of a table of JSON or TOML. Raises InvalidRequest."""
    if not isinstance(found, dict):
        raise invalid("entry", "is a table")
    role = _text(found, "role") or EngineRole.BOTH.value
    if role not in {known.value for known in EngineRole}:
        raise invalid("role", f"is one of {', '.join(known.value for known in EngineRole)}")
    draining = found.get("draining", False)
    if not isinstance(draining, bool):
        raise invalid("draining", "is true or false")
    entry = EngineEntry(
        _text(found, "engine_id"), _texts(found, "addresses"), _number(found, "incarnation"), _number(found, "life"),
        EngineRole(role), _text(found, "model"), _text(found, "layout"), _texts(found, "data_paths"),
        _text(found, "host"), _text(found, "tenant"), draining, _text(found, "version"),
        _text(found, "model_name"),
    )  # fmt: skip
    if not entry.engine_id:
        raise invalid("engine_id", "is required")
    if not entry.addresses:
        raise invalid("addresses", "has at least one")
    for address in entry.addresses:
        _check_address(address)
    return entry


def _check_address(address: str) -> None:
    host, colon, port = address.rpartition(":")
    plain = port.isascii() and port.isdecimal() and len(port) <= len("65535")
    # A channel reads a scheme, such as unix:, where it expects a host: an entry names hosts only.
    if not (colon and host and plain and 0 < int(port) <= 65535) or "/" in host or (":" in host and host[0] != "["):
        raise invalid("addresses", f"{address!r} is not host:port")


def _text(found: dict[str, Any], name: str) -> str:
    return _checked(name, found.get(name, ""))


def _texts(found: dict[str, Any], name: str) -> tuple[str, ...]:
    values = found.get(name, [])
    if not isinstance(values, list) or len(values) > ITEMS_MAX:
        raise invalid(name, f"is a list of at most {ITEMS_MAX} texts")
    return tuple(_checked(name, value) for value in values)


def _number(found: dict[str, Any], name: str) -> int:
    value = found.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= NUMBER_MAX:
        raise invalid(name, f"is a whole number from 0 to {NUMBER_MAX}")
    return value


def _checked(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable() or len(value.encode(errors="replace")) > TEXT_BYTES_MAX:
        raise invalid(name, f"is printable text of at most {TEXT_BYTES_MAX} bytes")
    return value
