"""Grants: unforgeable, relayable capabilities.

A grant's token is its claims in a compact fixed encoding, followed by an HMAC-SHA256 under a key that only the issuer
has (per incarnation, derived from the session's secret). Only the issuer can verify it. All others may read the claims
to find the issuer, and must not believe them. Nothing outside the token is trusted.
"""

import base64
import hmac
import struct
from collections.abc import Mapping
from enum import IntEnum
from functools import lru_cache

from kvgrpc.core.values.ids import TRANSFER_KEY_BYTES_MIN
from kvgrpc.core.values.owners import name_of, within
from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import Aborted, InvalidRequest, NotFound, PermissionDenied, PreconditionFailed, Reason

GRANT_BYTES_MAX = 512
"""Maximum size of a whole Grant message, so that it fits a header of any proxy."""
_FIELDS_BYTES = 48
"""Bytes of the Grant message beside the token, engine id, address and lease id: numbers, tags and lengths."""
_VERSION = 1
_TIMED = 2
"""Version of a token with the request's time after its numbers."""
_BOUND = 2
"""Added to the version of a token with the name of its consumer after its other texts."""
_MAC_BYTES = 32
_HEAD = struct.Struct("<BBBQIII")
_TIME = struct.Struct("<Q")
_READ_KEPT = 256
"""Number of tokens whose claims are cached, since every step of a call reads the claims of its grant. The cache says
nothing of a token's signature. Malformed tokens are not cached.
"""


class AccessKind(IntEnum):
    """The access that a grant allows. The numbers are those of the wire."""

    READ = 1
    WRITE = 2


class OnAbort(IntEnum):
    """Effect of a consumer's abort at the source. The numbers are those of the wire."""

    RELEASE = 1
    KEEP = 2


@dataclass(frozen=True)
class Claims:
    """The claims of a grant's token."""

    access: AccessKind
    engine_id: str
    incarnation: int
    address: str
    lease_id: str
    transfer_key: bytes
    ttl_s: float
    """TTL at minting; a hint."""
    block_count: int
    token_count: int
    on_abort: OnAbort = OnAbort.RELEASE
    tenant: str = ""
    request_time_us: int = 0
    """Time at which the request of a hand-over began, in microseconds since the Unix epoch; 0: not stated."""
    bound_to: str = ""
    """Name of the one consumer that may use it; empty: every consumer of the tenant."""


def signing_key(secret: bytes) -> bytes:
    """Derives the grant key of a session from its secret."""
    return hmac.digest(secret, b"kvgrpc grant key v1", "sha256")


def mint(claims: Claims, key: bytes) -> bytes:
    """Returns the token of `claims`. Raises InvalidRequest if the ids and the address are too long for one."""
    time_us = claims.request_time_us
    head = _HEAD.pack(
        (_TIMED if time_us else _VERSION) + (_BOUND if claims.bound_to else 0),
        claims.access,
        claims.on_abort,
        claims.incarnation,
        min(int(claims.ttl_s * 1000), 0xFFFFFFFF),
        claims.block_count,
        claims.token_count,
    )
    texts = (claims.engine_id, claims.address, claims.lease_id, claims.tenant)
    fields = [*map(str.encode, texts), claims.transfer_key]
    if claims.bound_to:
        fields.append(claims.bound_to.encode())
    sizes = list(map(len, fields))
    if max(sizes) > 255:
        raise InvalidRequest(Reason.INVALID_FIELD, "a grant's ids and address have at most 255 bytes each")
    payload = head + (_TIME.pack(time_us) if time_us else b"")
    for size, field in zip(sizes, fields, strict=True):
        payload += bytes([size]) + field
    token = payload + hmac.digest(key, payload, "sha256")
    message_bytes = len(token) + sum(sizes[:3]) + _FIELDS_BYTES
    if message_bytes > GRANT_BYTES_MAX:
        raise InvalidRequest(
            Reason.INVALID_FIELD,
            "engine id, address, tenant, consumer and transfer key are too long: they make a grant of "
            f"{message_bytes} bytes, the limit is {GRANT_BYTES_MAX}",
        )
    return token


@lru_cache(_READ_KEPT)
def read_claims(token: bytes) -> Claims:
    """Returns the claims of a token, unverified. Raises InvalidRequest (GRANT_INVALID) if it is not a token."""
    payload = token[:-_MAC_BYTES]
    try:
        version, access, on_abort, incarnation, ttl_ms, blocks, tokens = _HEAD.unpack_from(payload)
        fields, at, time_us = [], _HEAD.size, 0
        bound = version > _TIMED
        if version in (_TIMED, _TIMED + _BOUND):
            (time_us,) = _TIME.unpack_from(payload, at)
            at += _TIME.size
        for _ in range(5 + bound):
            end = at + 1 + payload[at]
            fields.append(payload[at + 1 : end])
            at = end
        if not _VERSION <= version <= _TIMED + _BOUND or at != len(payload) or len(fields[4]) < TRANSFER_KEY_BYTES_MIN:
            raise ValueError("wrong version or length")
        engine_id, address, lease_id, tenant = map(bytes.decode, fields[:4])
        named, ttl_s = (engine_id, incarnation, address, lease_id, fields[4]), ttl_ms / 1000
        bound_to = fields[5].decode() if bound else ""
        return Claims(AccessKind(access), *named, ttl_s, blocks, tokens, OnAbort(on_abort), tenant, time_us, bound_to)
    except (struct.error, IndexError, ValueError) as error:
        raise InvalidRequest(
            Reason.GRANT_INVALID, "this is not a kvgrpc grant; relay the bytes of Grant.token unchanged"
        ) from error


def verify(token: bytes, key: bytes, engine_id: str, incarnation: int, access: AccessKind) -> Claims:
    """Returns the claims of a token that this engine issued in this incarnation for this kind of access.

    Raises InvalidRequest (GRANT_INVALID), PermissionDenied (GRANT_FOREIGN, GRANT_INVALID), Aborted
    (INCARNATION_CHANGED) or PreconditionFailed (GRANT_WRONG_ACCESS).
    """
    claims = read_claims(token)
    if claims.engine_id != engine_id:
        raise PermissionDenied(
            Reason.GRANT_FOREIGN,
            f"the grant was issued by engine {claims.engine_id}, this is {engine_id}",
            metadata={"engine": claims.engine_id},
        )
    if claims.incarnation != incarnation:
        raise Aborted(
            Reason.INCARNATION_CHANGED,
            f"engine {engine_id} restarted since the grant was made; start over from the hand-over",
        )
    expected = hmac.digest(key, token[:-_MAC_BYTES], "sha256")
    if not hmac.compare_digest(expected, token[-_MAC_BYTES:]):
        raise PermissionDenied(Reason.GRANT_INVALID, "the grant's signature does not match")
    if claims.access is not access:
        raise PreconditionFailed(
            Reason.GRANT_WRONG_ACCESS, f"this is a {claims.access.name} grant; a {access.name} grant is needed"
        )
    return claims


def check_tenant(caller: str, claims: Claims) -> None:
    """Raises NotFound (LEASE_NOT_FOUND) for a grant of another tenant than the caller's."""
    if not within(caller, claims.tenant):
        raise NotFound(Reason.LEASE_NOT_FOUND, f"no lease {claims.lease_id} here")


def check_consumer(caller: str, claims: Claims) -> None:
    """Raises NotFound (LEASE_NOT_FOUND) for a consumer of another tenant than the grant's, and PermissionDenied
    (GRANT_BOUND) for another consumer than the one that the grant is bound to.
    """
    check_tenant(caller, claims)
    if claims.bound_to and claims.bound_to != name_of(caller):
        raise PermissionDenied(Reason.GRANT_BOUND, "this grant is bound to another consumer")


def to_json(token: bytes) -> dict[str, bool | int | str | list[int]]:
    """Returns the grant as the `kv_transfer_params` object that today's routers relay.

    Only `kvgrpc_grant` is read back. The other fields have the names that such routers look at.
    """
    claims = read_claims(token)
    host, _, port = claims.address.rpartition(":")
    if not port.isdecimal():
        host, port = claims.address, "0"
    return {
        "do_remote_prefill": claims.access is AccessKind.READ,
        "do_remote_decode": claims.access is AccessKind.WRITE,
        "remote_engine_id": claims.engine_id,
        "remote_request_id": claims.lease_id,
        "remote_host": host,
        "remote_port": int(port),
        "remote_block_ids": [],
        "remote_num_tokens": claims.token_count,
        "kvgrpc_grant": base64.urlsafe_b64encode(token).decode(),
    }


def from_json(params: Mapping[str, object]) -> bytes:
    """Returns the token in a `kv_transfer_params` object. Raises InvalidRequest (GRANT_INVALID) if there is none."""
    text = params.get("kvgrpc_grant")
    if not isinstance(text, str):
        raise InvalidRequest(Reason.GRANT_INVALID, "kv_transfer_params has no kvgrpc_grant")
    try:
        token = base64.b64decode(text.encode(), altchars=b"-_", validate=True)
    except ValueError as error:
        raise InvalidRequest(Reason.GRANT_INVALID, "kvgrpc_grant is not base64") from error
    read_claims(token)
    return token
