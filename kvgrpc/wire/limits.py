"""Conversion of limits and defaults to the message that tells callers of them, and back."""

from google.protobuf.duration_pb2 import Duration

from kvgrpc.core.values.limits import Limits
from kvgrpc.v1 import handshake_pb2
from kvgrpc.wire.values import duration


def limits_to_proto(value: Limits) -> handshake_pb2.Limits:
    return handshake_pb2.Limits(
        lease_ttl=duration(value.lease_ttl_s),
        lease_cap=duration(value.lease_cap_s),
        queue_timeout=duration(value.queue_timeout_s),
        transfer_timeout=duration(value.transfer_timeout_s),
        settle_timeout=duration(value.settle_timeout_s),
        registration_timeout=duration(value.registration_timeout_s),
        peer_grace=duration(value.peer_grace_s),
        request_block_count=value.blocks_per_request,
        message_bytes=value.message_bytes,
        lease_count=value.leases,
        transfer_count=value.transfers,
        wait=duration(value.wait_s),
        firm_ttl=duration(value.firm_ttl_s),
        least_bytes_per_second=value.least_bytes_per_s,
    )


def limits_from_proto(value: handshake_pb2.Limits) -> Limits:
    """Returns the limits that a lead stated at attach. Limits that are not on the wire keep their defaults."""
    return Limits(
        lease_ttl_s=_s(value.lease_ttl),
        lease_cap_s=_s(value.lease_cap),
        queue_timeout_s=_s(value.queue_timeout),
        transfer_timeout_s=_s(value.transfer_timeout),
        settle_timeout_s=_s(value.settle_timeout),
        registration_timeout_s=_s(value.registration_timeout),
        peer_grace_s=_s(value.peer_grace),
        blocks_per_request=value.request_block_count,
        message_bytes=value.message_bytes,
        leases=value.lease_count,
        transfers=value.transfer_count,
        wait_s=_s(value.wait),
        firm_ttl_s=_s(value.firm_ttl),
        least_bytes_per_s=value.least_bytes_per_second or Limits.least_bytes_per_s,
    )


def _s(value: Duration) -> float:
    return value.ToNanoseconds() / 1e9
