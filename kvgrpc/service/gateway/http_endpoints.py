"""HTTP endpoints of engines: an entry names its lead alone, so rules say where its engine serves HTTP."""

import asyncio
import ipaddress
import socket
import time
from collections import OrderedDict
from collections.abc import Mapping

from kvgrpc.fleet.entry import EngineEntry

HOST = "{host}"
RESOLVED_S = 5.0
"""Time for which the address of a name counts, in seconds."""
RESOLVE_S = 1.0
"""Timeout of a look-up, in seconds."""
NAMES_MAX = 1_024
"""Maximum number of names whose addresses are remembered."""


class HttpEndpoints:
    """Endpoints by `rules`: HOST:PORT by engine id, and for all others under the empty id. `{host}` in a rule stands
    for the host of the lead's first address.
    """

    def __init__(self, rules: Mapping[str, str]) -> None:
        self._rules = rules
        self._resolved: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """Addresses by name, each with the time until which it counts."""

    def has_rule(self, entry: EngineEntry) -> bool:
        return "" in self._rules or entry.engine_id in self._rules

    async def of(self, entry: EngineEntry) -> str:
        """Returns the endpoint of an engine, IP:PORT; empty if no rule fits or its name has no address."""
        rule = self._rules.get(entry.engine_id, self._rules.get("", ""))
        if not rule or (HOST in rule and not entry.addresses):
            return ""
        host, _, port = rule.rpartition(":")
        if HOST in host:
            host = host.replace(HOST, entry.addresses[0].rpartition(":")[0].strip("[]"))
        address = await self._address(host.strip("[]"))
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}" if address else ""

    async def _address(self, host: str) -> str:
        """Returns the IP address of a host; empty if it has none."""
        try:
            return str(ipaddress.ip_address(host))
        except ValueError:
            pass
        now = time.monotonic()
        address, until = self._resolved.get(host, ("", 0.0))
        if now < until:
            return address
        try:
            async with asyncio.timeout(RESOLVE_S):
                rows = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
            address = str(rows[0][4][0])
        except (OSError, UnicodeError, TimeoutError):
            address = ""
        self._resolved[host] = address, now + RESOLVED_S
        self._resolved.move_to_end(host)
        if len(self._resolved) > NAMES_MAX:
            self._resolved.popitem(last=False)
        return address
