"""Proofs that two leads exchange: made here, and checked on arrival."""

import secrets

from kvgrpc.core.values.ids import PROOF_BYTES_MAX, PROOF_BYTES_MIN
from kvgrpc.errors import invalid

NEW_BYTES = 32


def new_proof() -> bytes:
    """Returns a new secret."""
    return secrets.token_bytes(NEW_BYTES)


def proof(field: str, value: bytes) -> bytes:
    """Returns a peer's secret. Raises InvalidRequest if it is short enough to be guessed, or too long."""
    if not PROOF_BYTES_MIN <= len(value) <= PROOF_BYTES_MAX:
        raise invalid(field, f"has {PROOF_BYTES_MIN} to {PROOF_BYTES_MAX} random bytes")
    return value
