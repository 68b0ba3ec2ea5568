"""The values that one half of a Gloo group tells the other: a token, and where each of its connections listens.

The library trusts such values, down to the lengths within. So a peer's values travel in a form of our own, are checked
here, and only the result reaches the library. This module does not load the library, which takes seconds.
"""

import ipaddress
import struct
from dataclasses import dataclass

from kvgrpc.core.values.sends import Values
from kvgrpc.datapath.base import DataPathFailed, DataPathUnavailable

CONNECTIONS = 2
"""Number of connections of a group."""
TOKEN_BYTES = 32
_KEYS = ["token", *(str(index) for index in range(CONNECTIONS))]
_PORT = struct.Struct("!H")
_VERSIONS = {4: 4, 16: 6}
"""Versions of IP by the length of an address in bytes."""

Address = tuple[bytes, int]
"""Internet address, packed as it travels, and a port."""


@dataclass(frozen=True)
class Half:
    """One half of a group, as the other half must know it."""

    token: bytes
    """Token that the other half shows at each connection."""
    addresses: tuple[Address, ...]
    """Addresses at which the connections listen."""

    @property
    def values(self) -> Values:
        """The half in the form that travels."""
        packed = [_PORT.pack(port) + ip for ip, port in self.addresses]
        return tuple(zip(_KEYS, [self.token, *packed], strict=True))


def read_half(values: Values, host: str) -> Half:
    """Returns the peer's half, for a rank that listens at `host`. Raises DataPathFailed for malformed values, and
    DataPathUnavailable for an address to which no connection can be made.
    """
    found = dict(values)
    if len(values) != len(_KEYS) or sorted(found) != sorted(_KEYS):
        raise DataPathFailed(f"a half of a process group tells {', '.join(_KEYS)}, each once")
    token = found.pop(_KEYS[0])
    if len(token) != TOKEN_BYTES:
        raise DataPathFailed(f"the token of a half of a process group has {TOKEN_BYTES} bytes")
    version = 6 if ":" in host else 4
    return Half(token, tuple(_address(found[str(index)], version) for index in range(CONNECTIONS)))


def _address(value: bytes, version: int) -> Address:
    peers = _VERSIONS.get(len(value) - _PORT.size)
    if peers is None:
        raise DataPathFailed("a half of a process group tells where it listens as a port and an address")
    if peers != version:
        raise DataPathUnavailable(f"one rank listens at an address of IPv{peers}, the other one at one of IPv{version}")
    (port,), ip = _PORT.unpack_from(value), value[_PORT.size :]
    told = ipaddress.ip_address(ip)
    # In version 6 even loopback counts as reserved.
    if not port or told.is_unspecified or told.is_multicast or (told.version == 4 and told.is_reserved):
        raise DataPathUnavailable(
            f"nobody listens at port {port} of {told}, where half of a process group says it does"
        )
    return ip, port
