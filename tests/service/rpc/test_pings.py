"""Keepalive pings: a client that pings often, because a proxy drops idle connections, keeps its streams."""

import grpc

from kvgrpc.v1 import transfer_pb2, transfer_pb2_grpc
from tests.service.engines import Engine

PING_MS = 1_500
"""Time between pings in milliseconds: far below the 10 s in docs/routers.md, above the server's minimum of 1 s."""
OPEN_S = 9.0
"""Time of the watch in seconds, enough for six pings. gRPC ends a connection at the third ping that is too early."""


def test_pings_do_not_end_a_watch_on_which_nothing_happens(source: Engine) -> None:
    options = [
        ("grpc.keepalive_time_ms", PING_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    with grpc.insecure_channel(source.address, options=options) as channel:
        stub = transfer_pb2_grpc.TransferServiceStub(channel)
        watch = stub.WatchTransfers(transfer_pb2.WatchTransfersRequest(), timeout=OPEN_S)
        ends = []
        try:
            for _ in watch:
                pass
        except grpc.RpcError as error:
            ends.append(error.code())
    assert ends == [grpc.StatusCode.DEADLINE_EXCEEDED]
