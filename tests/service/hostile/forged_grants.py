"""Grants that their issuer did not make: forged, truncated, or no grants at all."""

import base64
from collections.abc import Callable
from typing import Any

from kvgrpc.core.values import grants
from kvgrpc.v1 import common_pb2


def forge(grant: common_pb2.Grant, **claims: Any) -> common_pb2.Grant:
    """Returns a grant with changed claims, signed with a key that is not the issuer's."""
    said = {**vars(grants.read_claims(grant.token)), **claims}
    return common_pb2.Grant(token=grants.mint(grants.Claims(**said), b"not the issuer's key"))


NO_TOKENS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "one byte": lambda _: b"x",
    "random": lambda token: bytes(len(token)),
    "truncated": lambda token: token[:-1],
    "without signature": lambda token: token[:-32],
    "longer": lambda token: token + b"x",
    "as long as it may be": lambda token: token.ljust(4_096, b"x"),
    "text": base64.b64encode,
}
