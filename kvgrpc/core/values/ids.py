"""Identifiers. All contain or are bound to an incarnation, and are opaque to their readers."""

import hashlib
import hmac
import re
from functools import lru_cache

from kvgrpc.errors import invalid

TRANSFER_KEY_BYTES_MIN = 16
"""Minimum size: at least 128 random bits, since a caller that knows the key can pair with or cancel the transfer."""
TRANSFER_KEY_BYTES_MAX = 64
ACCESS_ID_BYTES = 16
ID_BYTES = 16
"""Random bytes in the id of a thing that a request can name, so that nobody guesses another caller's id."""
PROOF_BYTES_MIN = 16
"""Minimum size of the proof that one life gives another: at least 128 random bits."""
PROOF_BYTES_MAX = 64
PROOFS_MAX = 4
"""Maximum number of proofs of one life in a handshake."""
INCARNATION_MAX = 2**53 - 1
"""Largest incarnation. Every language can hold it, also one whose only number is a double."""
LABEL_BYTES_MAX = 256
"""Maximum bytes of a label such as a request id, which other engines store."""
_LABEL_DIGITS = 32
"""Hex digits of the digest that ends a cut label."""
_KEYS_KEPT = 256
"""Number of cached peer keys, since every step of a call needs one. An engine id is a short text."""


def format_incarnation(incarnation: int) -> str:
    """Returns the incarnation as 16 hex digits."""
    return f"{incarnation:016x}"


def mint_id(secret: bytes, incarnation: int, kind: str, minter: str, number: int) -> str:
    """Returns the id of a thing: the first letter of its kind, the incarnation, and 128 bits that only a holder of the
    life's secret can predict. `kind` is "lease", "transfer" or "blocks" (an allocation).

    The function is pure, so that a scheduler mints a lease id without asking its lead. `minter` ("engine", "lead" or
    "target") keeps counters apart.
    """
    digest = hmac.digest(secret, f"{kind}|{minter}|{number}".encode(), "sha256")[:ID_BYTES]
    return f"{kind[0]}-{incarnation:016x}-{digest.hex()}"


def may_name(kind: str, name: str) -> bool:
    """Returns True if the text has the form of an id of this kind, of any life and engine."""
    return re.fullmatch(rf"{kind[0]}-[0-9a-f]{{16}}-[0-9a-f]{{{2 * ID_BYTES}}}", name) is not None


def mint_lease_id(secret: bytes, incarnation: int, minter: str, number: int) -> str:
    """Returns the id of a lease; see `mint_id`."""
    return mint_id(secret, incarnation, "lease", minter, number)


def next_access_ids(secret: bytes, access_id: bytes) -> tuple[bytes, bytes]:
    """Returns two access ids derived from a random one. Only a holder of the session's secret can predict them."""
    digest = hmac.new(secret, b"access|" + access_id, hashlib.sha256).digest()
    return digest[:ACCESS_ID_BYTES], digest[ACCESS_ID_BYTES : 2 * ACCESS_ID_BYTES]


@lru_cache(_KEYS_KEPT)
def peer_key(engine_id: str, incarnation: int) -> str:
    """Returns a key of one life of one engine, for ranks and logs."""
    return f"{engine_id}@{format_incarnation(incarnation)}"


def request_label(request_id: str) -> str:
    """Returns the label of a request's transfers: its id, of which a long one is cut and ends in a digest of the whole.
    Clients choose ids, and engines do not bound them.
    """
    text = request_id.encode(errors="replace")
    if len(text) <= LABEL_BYTES_MAX:
        return text.decode()
    digest = hashlib.sha256(text).hexdigest()[:_LABEL_DIGITS]
    return f"{text[: LABEL_BYTES_MAX - _LABEL_DIGITS - 1].decode(errors='ignore')}-{digest}"


def check_transfer_key(key: bytes, field: str = "transfer_key") -> None:
    """Raises InvalidRequest (INVALID_FIELD) if the length of the key is not allowed. `field` is its path."""
    if not TRANSFER_KEY_BYTES_MIN <= len(key) <= TRANSFER_KEY_BYTES_MAX:
        raise invalid(field, f"has {TRANSFER_KEY_BYTES_MIN} to {TRANSFER_KEY_BYTES_MAX} random bytes")
