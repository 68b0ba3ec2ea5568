"""The address of this host at which peers reach it."""

import socket
from contextlib import suppress

LOOPBACK = "127.0.0.1"


def own_host(address: str) -> str:
    """The address from which this host would reach `address`, "host:port" as a lead tells it to peers: for one of its
    own networks that address itself, for loopback the first one of it. Nothing is sent. An address that is none, or
    cannot be reached, gives loopback.
    """
    host = address.rpartition(":")[0].strip("[]")
    with suppress(OSError):
        family, kind, _, _, reached = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.connect(reached)
            return str(asking.getsockname()[0])
    return LOOPBACK
