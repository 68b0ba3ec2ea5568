"""HTTP endpoints of engines: an entry names its lead alone, so rules say where its engine serves HTTP."""

import asyncio
import ipaddress
import socket
import time
from collections import OrderedDict
from collections.abc import Mapping

from kvgrpc.fleet.entry import EngineEntry, EngineRole

HOST = "{host}"
PARTS = (EngineRole.PREFILL, EngineRole.DECODE)
"""Parts of a request that engines play. A rule under one of these words is no rule of an engine with that id."""
RESOLVED_S = 5.0
"""Time for which the address of a name counts, in seconds."""
RESOLVE_S = 1.0
"""Timeout of a look-up, in seconds."""
NAMES_MAX = 1_024
"""Maximum number of names whose addresses are remembered."""


class HttpEndpoints:
    """Endpoints by `rules`: HOST:PORT by engine id; for others by the part that an engine plays, and else under the
    empty id. `{host}` in a rule stands for the host of the lead's first address.
    """

    def __init__(self, rules: Mapping[str, str]) -> None:
        self._rules = rules
        self._resolved: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """Addresses by name, each with the time until which it counts."""

    def has_rule(self, entry: EngineEntry) -> bool:
        """Returns whether an engine has a rule for each part that it may play."""
        return all(self._rule(entry, part) for part in PARTS if entry.role in (part, EngineRole.BOTH))

    async def of(self, entry: EngineEntry, part: EngineRole) -> str:
        """Returns the endpoint of an engine that plays a part, IP:PORT; empty if no rule fits or its name has no
        address.
        """
        rule = self._rule(entry, part)
        if not rule or (HOST in rule and not entry.addresses):
            return ""
        host, _, port = rule.rpartition(":")
        if HOST in host:
            host = host.replace(HOST, entry.addresses[0].rpartition(":")[0].strip("[]"))
        address = await self._address(host.strip("[]"))
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}" if address else ""

    def _rule(self, entry: EngineEntry, part: EngineRole) -> str:
        """Returns the rule that fits best; empty: none."""
        own = "" if entry.engine_id in PARTS else self._rules.get(entry.engine_id, "")
        return own or self._rules.get(part) or self._rules.get("", "")

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
