"""Accesses that a consumer opens at their issuer."""

from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import common_pb2
from tests.service.consumer import Consumer
from tests.service.values import prompt

TOKENS = prompt(40)
VALID = peer_pb2.VERDICT_VALID


def reason_of(opened: peer_pb2.OpenedAccess) -> str:
    return common_pb2.FailureReason.Name(opened.failure.reason).removeprefix("FAILURE_REASON_")


def open_one(consumer: Consumer, grant: common_pb2.Grant, access_id: bytes, use_tokens: int = 0) -> str:
    """Opens an access. Returns the reason of the refusal, or "" if the access is open."""
    (row,) = consumer.open(grant, TOKENS, access_id, use_tokens=use_tokens).results
    return reason_of(row) if row.HasField("failure") else ""
