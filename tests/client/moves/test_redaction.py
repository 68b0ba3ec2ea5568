"""Printed messages show no secret."""

import pytest
from google.protobuf.message import Message

from kvgrpc.client import redacted
from kvgrpc.v1 import handoff_pb2, handshake_pb2, lease_pb2, tensor_pb2
from kvgrpc.v1.common_pb2 import Grant

SECRET = b"open sesame"
GRANT = Grant(token=SECRET, engine_id="engine-1")


@pytest.mark.parametrize(
    "message",
    [
        GRANT,
        handoff_pb2.FinishedBlocksRequest(transfer_key=SECRET, request_id="engine-1"),
        handoff_pb2.FinishedBlocksResponse(grant=GRANT),
        lease_pb2.RenewLeasesRequest(leases=[lease_pb2.LeaseRef(grant=GRANT), lease_pb2.LeaseRef(lease_id="l-1")]),
        handshake_pb2.HandshakeRequest(proofs=[SECRET, SECRET], expected_engine_id="engine-1"),
        tensor_pb2.ReleaseTensorsRequest(transfer_key=SECRET, names=[tensor_pb2.TensorName(name="engine-1")]),
    ],
    ids=lambda message: type(message).__name__,
)
def test_no_secret_is_printed_at_any_depth_and_the_message_stays_as_it_is(message: Message) -> None:
    before, text = message.SerializeToString(), redacted(message)
    assert "open sesame" in str(message), "protobuf itself shows it"
    assert "open sesame" not in text
    assert "[REDACTED]" in text
    assert "engine-1" in text
    assert message.SerializeToString() == before
