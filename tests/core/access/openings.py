"""Makes openings of grants, and reads the reasons why they are refused."""

from typing import Any

from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.errors import KVGrpcError, Reason
from tests.core.nodes import access_id, claim


def opening(token: bytes, number: int = 1, tokens: int = 32, **fields: Any) -> AccessOpening:
    fields.setdefault("claim", claim(tokens))
    return AccessOpening(access_id(number), token, **fields)


def reason(row: object) -> Reason:
    assert isinstance(row, KVGrpcError)
    return row.reason
