"""DNS: the leads are those whose names or addresses a name has, and each of them says which engine it is.

An answer is the whole list. No answer, an error and an empty answer are a registry that is down: a name server that
lost its zone takes no engine out of use.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

import dns.asyncresolver
import dns.exception
import dns.name
import dns.rdtypes.IN.SRV
import dns.resolver

from kvgrpc.errors import invalid
from kvgrpc.registry.base import RegistryNews, down
from kvgrpc.registry.introductions import Candidate, Introduce, IntroductionLimits, Introductions

SERVICES = "dns+srv"
"""Beginning of a registry's address, before ://, whose name has SRV records."""
DNS_PORT = 53
LOOK_MIN_S, LOOK_MAX_S = 1.0, 30.0
"""Shortest and longest time between two questions to DNS, in seconds, whatever the answer's time to live is."""


@dataclass(frozen=True)
class DnsSettings:
    """The name that is looked up, and how."""

    name: str
    port: int = 0
    """Port of the leads at the name's addresses; 0: the name has SRV records, which state ports."""
    servers: tuple[str, ...] = ()
    """IP addresses of name servers; empty: those of this machine."""
    server_port: int = DNS_PORT
    timeout_s: float = 3.0
    """Deadline of a question, in seconds. A packet that is lost is sent again before it."""
    look_min_s: float = LOOK_MIN_S
    look_max_s: float = LOOK_MAX_S


def dns_settings(address: str) -> DnsSettings:
    """Returns the settings of dns:///NAME:PORT or dns+srv:///NAME. A name server may stand before the name, as
    //IP:PORT/NAME, in the form that gRPC has. Raises InvalidRequest.
    """
    try:
        parts = urlsplit(address)
        name, port = parts.path.removeprefix("/"), 0
        if parts.scheme != SERVICES:
            name, _, digits = name.rpartition(":")
            port = int(digits) if digits.isascii() and digits.isdecimal() and len(digits) <= len("65535") else 0
            if not 0 < port <= 65535:
                raise invalid("registry", f"{address!r} is not dns:///NAME:PORT")
        if not name or not dns.name.from_text(name).labels[:-1]:
            raise invalid("registry", f"{address!r} names no host: three slashes stand before it")
        servers = (str(ip_address(parts.hostname)),) if parts.hostname else ()
        return DnsSettings(name, port, servers, parts.port or DNS_PORT)
    except (dns.exception.DNSException, ValueError) as error:
        raise invalid("registry", f"{address!r} is no address of DNS: {error}") from error


class DnsRegistry:
    """The leads that a name stands for."""

    def __init__(self, settings: DnsSettings, introduce: Introduce, limits: IntroductionLimits | None = None) -> None:
        self._settings = settings
        self._introductions = Introductions(introduce, limits)

    def watch(self) -> AsyncIterator[RegistryNews]:
        return self._introductions.watch(self._look())

    async def close(self) -> None:
        pass

    async def _look(self) -> AsyncIterator[list[Candidate]]:
        settings = self._settings
        while True:
            try:
                resolver = self._resolver()
                answer = await (self._services(resolver) if not settings.port else self._addresses(resolver))
            except (dns.exception.DNSException, OSError) as error:
                raise down(f"{settings.name}: {error}") from error
            if not answer.found:
                raise down(f"{settings.name} has no leads")
            yield [Candidate(address, address) for address in sorted(answer.found)]
            await asyncio.sleep(min(max(answer.ttl_s, settings.look_min_s), settings.look_max_s))

    def _resolver(self) -> dns.asyncresolver.Resolver:
        """Returns a resolver of this moment: the machine's name servers may change."""
        made = dns.asyncresolver.Resolver(configure=not self._settings.servers)
        if self._settings.servers:
            made.nameservers, made.port = list(self._settings.servers), self._settings.server_port
            made.domain = dns.name.root
        return made

    async def _services(self, resolver: dns.asyncresolver.Resolver) -> "_Answer":
        found = await self._ask(resolver, "SRV")
        records = [one for one in found if isinstance(one, dns.rdtypes.IN.SRV.SRV)]
        # A service at the root is one that is not there.
        addresses = {
            f"{one.target.to_text(omit_final_dot=True).lower()}:{one.port}"
            for one in records
            if one.target != dns.name.root and one.port
        }
        return _Answer(frozenset(addresses), found.chaining_result.minimum_ttl)

    async def _addresses(self, resolver: dns.asyncresolver.Resolver) -> "_Answer":
        """Returns the name's IPv4 addresses or, if it has none, its IPv6 ones: a lead with both is one lead."""
        try:
            found = await self._ask(resolver, "A")
            hosts = {str(one) for one in found}
        except dns.resolver.NoAnswer:
            found = await self._ask(resolver, "AAAA")
            hosts = {f"[{one}]" for one in found}
        return _Answer(frozenset(f"{host}:{self._settings.port}" for host in hosts), found.chaining_result.minimum_ttl)

    async def _ask(self, resolver: dns.asyncresolver.Resolver, kind: str) -> dns.resolver.Answer:
        return await resolver.resolve(self._settings.name, kind, lifetime=self._settings.timeout_s, search=True)


@dataclass(frozen=True)
class _Answer:
    found: frozenset[str]
    ttl_s: float
