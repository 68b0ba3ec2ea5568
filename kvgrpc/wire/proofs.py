"""What two leads tell each other to show: drawn here, and checked as it comes in."""

import secrets

from kvgrpc.core.values.ids import PROOF_BYTES_MAX, PROOF_BYTES_MIN
from kvgrpc.errors import invalid

NEW_BYTES = 32


def new_proof() -> bytes:
    """A secret that nobody else knows."""
    return secrets.token_bytes(NEW_BYTES)


def proof(field: str, value: bytes) -> bytes:
    """A secret of a peer. Raises InvalidRequest for one that could be guessed, or is long."""
    if not PROOF_BYTES_MIN <= len(value) <= PROOF_BYTES_MAX:
        raise invalid(field, f"has {PROOF_BYTES_MIN} to {PROOF_BYTES_MAX} random bytes")
    return value
