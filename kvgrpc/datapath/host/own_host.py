"""Finds the address at which peers reach this host."""

import socket
from contextlib import suppress

LOOPBACK = "127.0.0.1"


def own_host(address: str) -> str:
    """Returns the address from which this host would reach `address`, "host:port" as a lead tells it to peers. For an
    address of its own networks it is that address itself, for loopback the first loopback address. Nothing is sent. A
    malformed or unreachable address gives loopback.
    """
    host = address.rpartition(":")[0].strip("[]")
    with suppress(OSError):
        family, kind, _, _, reached = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.connect(reached)
            return str(asking.getsockname()[0])
    return LOOPBACK
