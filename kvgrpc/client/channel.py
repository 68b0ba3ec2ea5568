"""The channel of a client: which calls gRPC repeats by itself, how it reconnects, how it notices a dead connection.

Rules:
* Only UNAVAILABLE is retried: it says that the server did not take the call. Every mutating request carries an
  idempotency key, so that even a call whose answer was lost acts once.
* ConnectPeer is not retried: its UNAVAILABLE is the other server's, after the whole time that a connection may take. A
  second attempt would leave of it no more than that the call's own time was over.
* Streams are not retried here. Their loops come back by themselves, because only they know where to go on.
* `waitForReady` is off: a server that is away is an error after the retries, not a silent wait.
"""

import json
from collections.abc import Sequence

import grpc
from grpc import aio

SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{}],
            "waitForReady": False,
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 3,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        },
        {
            "name": [
                {"service": "kvgrpc.v1.HandshakeService", "method": "ConnectPeer"},
                {"service": "kvgrpc.v1.HandshakeService", "method": "WatchEngine"},
                {"service": "kvgrpc.v1.TransferService", "method": "WatchTransfers"},
                {"service": "kvgrpc.v1.LeaseService", "method": "KeepAlive"},
                {"service": "kvgrpc.v1.CallService", "method": "StreamCalls"},
                {"service": "kvgrpc.v1.SchedulerService", "method": "Schedule"},
            ],
            "waitForReady": False,
        },
    ]
}
"""For other languages the same stands in clients/go/service_config.json."""

CHANNEL_OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
    # A connection whose other end is gone without a word is noticed in 40 s. Pings go out during calls only, and no
    # call lives longer than a minute: too few for a server with gRPC's own limits (3 in a row) to object to.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # gRPC's own pause after a refused connection grows to two minutes, in which every call fails at once. A server
    # that restarts is back in seconds.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None, options: Sequence[tuple[str, str | int]]
) -> aio.Channel:
    """A channel in the running event loop; `options` go over CHANNEL_OPTIONS. Connects at the first call."""
    merged = list(({**dict(CHANNEL_OPTIONS), **dict(options)}).items())
    if credentials is None:
        return aio.insecure_channel(address, options=merged)
    return aio.secure_channel(address, credentials, options=merged)
