"""Transfer keys that two engines make of what both know of a request, where nobody names its transfer.

Ids of requests are in lists, and prompts can be guessed: by a secret that both engines share nobody else makes the key.
"""

import hashlib
import hmac
from pathlib import Path

SECRET_BYTES_MIN = 16


def derived_key(secret: bytes, said: bytes) -> bytes:
    """What engines with this secret call the transfer of a request of which both know this."""
    return hmac.digest(secret, said, "sha256") if secret else hashlib.sha256(said).digest()


def read_secret(path: str) -> bytes:
    """What is in the file of `pairing_secret_file`, without white space round it; empty where there is no such setting.
    Raises ValueError for a file that cannot be read, and a secret that is too short, of which it shows nothing.
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
