"""Bearer tokens: JSON Web Tokens in the metadata `authorization`, checked with public keys from a file.

Only algorithms with a public key exist here: a shared secret would let the server, and everyone who reads its files,
make tokens. The token does not choose: the configuration names the algorithms, and a key allows those of its kind.
"""

import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from kvgrpc.config_security import TokenConfig
from kvgrpc.errors import Reason, Unauthenticated
from kvgrpc.service.identity.names import JWT, readable
from kvgrpc.service.identity.watched_file import WatchedFile

SCHEME = "bearer "
"""Beginning of the metadata's value, in small letters."""
TOKEN_BYTES_MAX = 16_384
"""Maximum size of a token, in bytes: more than headers may have on most ways."""
TOKENS_KEPT = 4_096
"""Maximum number of tokens whose check is remembered: a signature costs more than all else of a call."""
CURVES = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
REQUIRED = ("exp", "iss", "aud", "sub")
"""Claims that every token has."""

PublicKey = Any
PublicKeys = Mapping[str, tuple[PublicKey, frozenset[str]]]
"""Public keys by their ids, each with the algorithms of its kind."""


class TokenVerifier:
    """Checks the tokens of callers by the configuration and the key file."""

    def __init__(self, config: TokenConfig) -> None:
        """Raises InvalidRequest for an unusable key file."""
        self._config = config
        self._algorithms = config.algorithm_names()
        self._keys = WatchedFile("tokens.keys", Path(config.keys), keys_of)
        self._known: OrderedDict[bytes, tuple[PublicKeys, str, float]] = OrderedDict()
        """Keys that a token was checked with, name of its caller, and its end on the wall clock, by the token's digest.
        Other keys, from another thread, make a row outdated.
        """

    def look(self) -> bool:
        """Reads the key file again. Returns whether other keys are in use now."""
        return self._keys.look()

    def name_of(self, authorization: str) -> str:
        """Returns the name of the caller with that metadata. Raises Unauthenticated."""
        if not authorization[: len(SCHEME)].lower() == SCHEME:
            raise _refused("the metadata authorization is not of the form: Bearer TOKEN")
        token = authorization[len(SCHEME) :].strip()
        if len(token) > TOKEN_BYTES_MAX:
            raise _refused(f"a token has at most {TOKEN_BYTES_MAX} bytes")
        digest = hashlib.sha256(token.encode(errors="replace")).digest()
        known, keys = self._known.get(digest), self._keys.value
        if known is None or known[0] is not keys:
            known = self._known[digest] = keys, *self._verified(token, keys)
            if len(self._known) > TOKENS_KEPT:
                self._known.popitem(last=False)
        _, name, ends = known
        if time.time() >= ends:
            del self._known[digest]
            raise _refused("the token has expired")
        return name

    def _verified(self, token: str, keys: PublicKeys) -> tuple[str, float]:
        import jwt

        try:
            head = jwt.get_unverified_header(token)
            key, fits = _key(head, keys)
            config = self._config
            claims = jwt.decode(
                token, key, algorithms=[name for name in self._algorithms if name in fits], audience=config.audience,
                issuer=config.issuer, leeway=config.leeway_s, options={"require": list(REQUIRED)},
            )  # fmt: skip
            name, ends = readable(JWT, claims["sub"]), float(claims["exp"]) + config.leeway_s
        except (jwt.PyJWTError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            # The library's text may repeat claims; its kind says enough, and no claim gets into a log.
            raise _refused(f"the token is not valid here: {type(error).__name__}") from None
        if not name:
            raise _refused("the token's subject is no name")
        return name, ends


def _key(head: Mapping[str, Any], keys: PublicKeys) -> tuple[PublicKey, frozenset[str]]:
    """Returns the key that a token names, and the algorithms of the key's kind. Raises KeyError."""
    named = head.get("kid")
    if named is not None and named in keys:
        return keys[named]
    if len(keys) == 1 and (named is None or "" in keys):
        return next(iter(keys.values()))
    raise KeyError("kid")


def keys_of(data: bytes) -> PublicKeys:
    """Returns the public keys of a file by their ids, each with the algorithms of its kind. The file is one key in PEM,
    whose id is empty, or a JSON Web Key Set. Raises ValueError.
    """
    if data.lstrip()[:1] != b"{":
        try:
            key = load_pem_public_key(data)
        except UnsupportedAlgorithm as error:
            raise ValueError(f"the file holds a key that cannot be used: {error}") from error
        return {"": (key, fitting(key))}
    rows = json.loads(data).get("keys")
    if not isinstance(rows, list) or not rows:
        raise ValueError("a JSON Web Key Set has a list of keys")
    found: dict[str, tuple[PublicKey, frozenset[str]]] = {}
    for row in rows:
        if not isinstance(row, dict) or row.get("kty") == "oct" or "d" in row:
            raise ValueError("the set has a key that is not a public key")
        name = row.get("kid", "")
        if not isinstance(name, str) or name in found:
            raise ValueError("each key of the set has an id of its own, which is a text")
        if row.get("use", "sig") == "sig":
            found[name] = _row_key(row)
    if not found:
        raise ValueError("the set has no key for signatures")
    return found


def _row_key(row: Mapping[str, Any]) -> tuple[PublicKey, frozenset[str]]:
    """Returns the key of a row of a set, and the algorithms that it may be used with. Raises ValueError."""
    import jwt

    try:
        key = jwt.PyJWK(dict(row)).key
    except (jwt.PyJWTError, UnsupportedAlgorithm, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"the set has a key that cannot be used: {type(error).__name__}") from error
    fits = fitting(key)
    return key, frozenset(one for one in fits if row.get("alg", one) == one)


def fitting(key: PublicKey) -> frozenset[str]:
    """Returns the algorithms of the kind of a public key. Raises ValueError for other keys."""
    if isinstance(key, rsa.RSAPublicKey):
        return frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"})
    if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in CURVES:
        return frozenset({CURVES[key.curve.name]})
    if isinstance(key, ed25519.Ed25519PublicKey | ed448.Ed448PublicKey):
        return frozenset({"EdDSA"})
    raise ValueError("the file holds no public key of RSA, of a NIST curve or of Edwards")


def _refused(why: str) -> Unauthenticated:
    return Unauthenticated(Reason.NOT_AUTHENTICATED, why)
