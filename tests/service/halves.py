"""Halves of process groups that look like an honest rank's, but have no rank behind them."""

import secrets
import socket

from kvgrpc.core.values.sends import Values
from kvgrpc.datapath.collective.half import CONNECTIONS, TOKEN_BYTES, Half
from kvgrpc.peer.v1 import peer_pb2


def dead(port: int) -> Values:
    """Returns a half whose connections all lead to one port of this host."""
    addresses = ((socket.inet_aton("127.0.0.1"), port),) * CONNECTIONS
    return Half(secrets.token_bytes(TOKEN_BYTES), addresses).values


def in_rows(values: Values) -> list[peer_pb2.GroupValue]:
    """Returns the values as PostSend takes them."""
    return [peer_pb2.GroupValue(key=key, value=value) for key, value in values]
