"""Identifiers. All are strings or bytes that contain or are bound to an incarnation, and opaque to their readers."""

import hashlib
import hmac
import re
from functools import lru_cache

from kvgrpc.errors import invalid

TRANSFER_KEY_BYTES_MIN = 16
"""A transfer key carries at least 128 random bits: a caller that knows it can pair with or cancel the transfer."""
TRANSFER_KEY_BYTES_MAX = 64
ACCESS_ID_BYTES = 16
ID_BYTES = 16
"""Random bytes in the id of a thing that a request can name: nobody guesses the id of another caller's thing."""
PROOF_BYTES_MIN = 16
"""What one life tells another to show carries at least 128 random bits."""
PROOF_BYTES_MAX = 64
PROOFS_MAX = 4
"""Of one life, in a handshake."""
INCARNATION_MAX = 2**53 - 1
"""Every language can hold it, those whose only number is a double too."""
_KEYS_KEPT = 256
"""Keys of peers that this process remembers, since every step of a call asks for one. An engine id is a short text."""


def format_incarnation(incarnation: int) -> str:
    """16 hex digits."""
    return f"{incarnation:016x}"


def mint_id(secret: bytes, incarnation: int, kind: str, minter: str, number: int) -> str:
    """The id of a thing: its kind's first letter, the incarnation, and 128 bits that only a holder of the life's secret
    can predict. `kind` is "lease", "transfer" or "blocks", of an allocation.

    A pure function, so that a scheduler mints a lease id without asking its lead. `minter` ("engine", "lead" or
    "target") keeps counters apart.
    """
    digest = hmac.digest(secret, f"{kind}|{minter}|{number}".encode(), "sha256")[:ID_BYTES]
    return f"{kind[0]}-{format_incarnation(incarnation)}-{digest.hex()}"


def may_name(kind: str, name: str) -> bool:
    """Whether that text may be the id of a thing of this kind, of whichever life and engine."""
    return re.fullmatch(rf"{kind[0]}-[0-9a-f]{{16}}-[0-9a-f]{{{2 * ID_BYTES}}}", name) is not None


def mint_lease_id(secret: bytes, incarnation: int, minter: str, number: int) -> str:
    """The id of a lease; see `mint_id`."""
    return mint_id(secret, incarnation, "lease", minter, number)


def next_access_ids(secret: bytes, access_id: bytes) -> tuple[bytes, bytes]:
    """Two access ids that follow a random one. Only a holder of the session's secret can predict them."""
    digest = hmac.new(secret, b"access|" + access_id, hashlib.sha256).digest()
    return digest[:ACCESS_ID_BYTES], digest[ACCESS_ID_BYTES : 2 * ACCESS_ID_BYTES]


@lru_cache(_KEYS_KEPT)
def peer_key(engine_id: str, incarnation: int) -> str:
    """One life of one engine, as a key for ranks and logs."""
    return f"{engine_id}@{format_incarnation(incarnation)}"


def check_transfer_key(key: bytes, field: str = "transfer_key") -> None:
    """Raises InvalidRequest (INVALID_FIELD) for a key of another length than the API allows. `field` is its path."""
    if not TRANSFER_KEY_BYTES_MIN <= len(key) <= TRANSFER_KEY_BYTES_MAX:
        raise invalid(field, f"has {TRANSFER_KEY_BYTES_MIN} to {TRANSFER_KEY_BYTES_MAX} random bytes")
