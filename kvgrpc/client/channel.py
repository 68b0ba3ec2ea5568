"""Opens a client's channel, and sets its retries, its reconnects and its detection of dead connections.

Rules:
* gRPC retries UNAVAILABLE only: it says that the server did not take the call. `caller` repeats CANCELLED without a
  reason. Every mutating request carries an idempotency key, so that a call whose answer was lost still acts at most
  once.
* ConnectPeer is not retried: its UNAVAILABLE is the other server's, after the whole connect timeout. A second attempt
  would fail with DEADLINE_EXCEEDED, which hides the cause.
* gRPC does not retry streams. Their own loops reconnect, because only they know where to resume.
* `waitForReady` is off: an unreachable server is an error after the retries, not a silent wait.
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
"""The service config of all channels. clients/go/service_config.json holds the same for other languages."""

CHANNEL_OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
    # A connection whose other end vanished is noticed within 40 s. Pings go out during calls only, and no call lasts
    # longer than a minute, so a server with gRPC's default limits (3 in a row) sees too few pings to object.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # gRPC's own back-off after a refused connection grows to two minutes, during which every call fails at once. A
    # server that restarts is back in seconds.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def check_target(address: str) -> None:
    """Raises ValueError for a URL and for a host without a port: gRPC would look for another host, or dial port 443."""
    scheme, names, _ = address.partition("://")
    named = names or address.startswith(("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:", "vsock:"))
    if scheme in ("http", "https") or not (named or is_host_port(address)):
        raise ValueError(f"{address!r} is not host:port, such as 127.0.0.1:50051")


def is_host_port(address: str) -> bool:
    """Returns whether an address is host:port, an IPv6 host in brackets. gRPC would dial port 99999 as 34463."""
    host, _, port = address.rpartition(":")
    known = port.isascii() and port.isdecimal() and len(port) <= len("65535") and 0 < int(port) <= 65535
    return known and host != "" and "/" not in host and (":" not in host or host.endswith("]"))


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None, options: Sequence[tuple[str, str | int]]
) -> aio.Channel:
    """Returns a channel in the running event loop, connected at the first call. `options` override CHANNEL_OPTIONS."""
    merged = list(({**dict(CHANNEL_OPTIONS), **dict(options)}).items())
    if credentials is None:
        return aio.insecure_channel(address, options=merged)
    return aio.secure_channel(address, credentials, options=merged)
