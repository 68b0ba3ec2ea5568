"""An issuer of tokens of a test, and files of roles."""

import base64
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from kvgrpc.config_security import TokenConfig

ISSUER, AUDIENCE = "https://issuer.test", "kvgrpc"


class Issuer:
    """Signs tokens with a key of its own."""

    def __init__(self, kid: str = "first") -> None:
        self.kid = kid
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._pem = self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @property
    def public_pem(self) -> bytes:
        """The public key."""
        return self._key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def row(self) -> dict[str, Any]:
        """Returns the public key as a row of a JSON Web Key Set."""
        made = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(self._key.public_key()))
        return {**made, "kid": self.kid, "alg": "ES256", "use": "sig"}

    def claims(self, subject: str = "router", **changed: Any) -> dict[str, Any]:
        """Returns the claims of a good token; a change to None leaves the claim out."""
        made = {"iss": ISSUER, "aud": AUDIENCE, "sub": subject, "exp": time.time() + 600} | changed
        return {name: value for name, value in made.items() if value is not None}

    def token(self, subject: str = "router", **changed: Any) -> str:
        """Returns a token."""
        return jwt.encode(self.claims(subject, **changed), self._pem, "ES256", {"kid": self.kid})

    def config(self, path: Path, **changed: Any) -> TokenConfig:
        """Writes the public key, and returns the settings of a server that takes this issuer's tokens."""
        path.write_bytes(self.public_pem)
        return TokenConfig(**{"keys": str(path), "issuer": ISSUER, "audience": AUDIENCE, **changed})


def unsigned(claims: Mapping[str, Any], head: Mapping[str, Any], signature: bytes = b"") -> str:
    """Returns a token with any header and signature."""
    parts = [json.dumps(part).encode() for part in (head, claims)]
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in (*parts, signature))


def bearer(token: str) -> str:
    """Returns the metadata's value."""
    return f"Bearer {token}"
