"""Transfer keys that two engines derive from what both know of a request, if nobody names its transfer.

Request ids are in lists, and prompts can be guessed: with a secret that both engines share nobody else makes the key.
"""

import hashlib
import hmac
from pathlib import Path

SECRET_BYTES_MIN = 16


def derived_key(secret: bytes, said: bytes) -> bytes:
    """Returns the transfer key that engines with this secret derive from what both know of a request."""
    return hmac.digest(secret, said, "sha256") if secret else hashlib.sha256(said).digest()


def read_secret(path: str) -> bytes:
    """Returns the secret in the file of `pairing_secret_file`, stripped of white space; empty without that setting.
    Raises ValueError for a file that cannot be read, or a secret that is too short, and shows nothing of it.
    """
    if not path:
        return b""
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ValueError(f"pairing_secret_file: {error}") from error
    if len(secret) < SECRET_BYTES_MIN:
        raise ValueError(
            f"pairing_secret_file: {path} has {len(secret)} bytes; write {SECRET_BYTES_MIN} random ones or more into "
            "it, such as those of `openssl rand -hex 32`, the same for both engines"
        )
    return secret


def room_key(secret: bytes, room: int) -> bytes:
    """Returns the transfer key that engines with this secret derive from the room that a router of SGLang chose."""
    return derived_key(secret, b"sglang_room:" + room.to_bytes(8, "little", signed=True))
