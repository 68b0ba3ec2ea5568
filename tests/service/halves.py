"""Halves of process groups that look like those of an honest rank, with nobody behind them."""

import secrets
import socket

from kvgrpc.core.values.sends import Values
from kvgrpc.datapath.collective.half import CONNECTIONS, TOKEN_BYTES, Half
from kvgrpc.peer.v1 import peer_pb2


def dead(port: int) -> Values:
    """A half whose connections are all at one port of this host."""
    addresses = ((socket.inet_aton("127.0.0.1"), port),) * CONNECTIONS
    return Half(secrets.token_bytes(TOKEN_BYTES), addresses).values


def in_rows(values: Values) -> list[peer_pb2.GroupValue]:
    """As PostSend takes them."""
    return [peer_pb2.GroupValue(key=key, value=value) for key, value in values]
