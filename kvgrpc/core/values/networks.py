"""Hosts and networks that an operator names, and the data paths that may be used on them."""

import ipaddress
import re
from collections.abc import Iterable

from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.core.values.records import dataclass

PLAIN_TEXT = frozenset({"nixl", "collective"})
"""Data paths that send KV between hosts, all of them in plain text."""
_HOST = re.compile(r"[\w.-]+")


def is_loopback(host: str) -> bool:
    """Returns whether a host means this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_named(host: str, names: Iterable[str]) -> bool:
    """Returns whether a host is one of the names, or lies in one of the networks among them. "*" names all."""
    return any(_matches(host, name) for name in names)


def unreadable(names: Iterable[str]) -> str:
    """Returns the first name that is no host, no network and not "*", such as host:port or 10.*; empty if there is
    none.
    """
    return next((name for name in names if name != "*" and not _HOST.fullmatch(name) and not _is_network(name)), "")


def _is_network(name: str) -> bool:
    try:
        ipaddress.ip_network(name, strict=False)
    except ValueError:
        return False
    return True


def _matches(host: str, name: str) -> bool:
    if name in (host, "*"):
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(name, strict=False)
    except ValueError:
        return False


@dataclass(frozen=True)
class PrivateNetworks:
    """Hosts and networks between which KV may travel in plain text."""

    names: tuple[str, ...] = ("*",)

    def why_not(self, peer: str, own: str) -> str:
        """Returns why the bytes between two leads, by the addresses at which they are dialled, may not travel in plain
        text; empty if they may.
        """
        host = _host(peer)
        if is_loopback(host) or host == _host(own) or is_named(host, self.names):
            return ""
        where = host or "a peer without an address"
        return f"it sends plain text, and {where} is not on a network that is declared private (private_networks)"

    def usable(self, endpoints: Iterable[RankEndpoint], peer: str, own: str) -> tuple[RankEndpoint, ...]:
        """Returns endpoints of one lead for the other, without data paths that may not be used between them."""
        why_not = self.why_not(peer, own)
        return tuple(endpoint.without(PLAIN_TEXT) if why_not else endpoint for endpoint in endpoints)


EVERYWHERE = PrivateNetworks()
"""All networks: what a server without TLS has."""


def _host(address: str) -> str:
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")
