"""Settings of the fleet: the registry, and what a lead publishes there of itself."""

import re
from dataclasses import dataclass

from kvgrpc.config_errors import invalid
from kvgrpc.registry.addresses import LEASES, SCHEMES

ETCD, FILE = "etcd://", "file:"
"""Beginnings of a registry's address."""
FLEET_ROLES = ("prefill", "decode", "both")
TTL_MIN_S, TTL_MAX_S = 3, 3_600
"""Bounds of the time after which the entry of a dead lead goes, in seconds."""
CHECK_MIN_S, CHECK_MAX_S = 0.5, 10.0
"""Bounds of the time between two health checks of an engine, in seconds. An answer counts for 15 seconds."""
TEXT_BYTES_MAX = 256
"""Maximum size of a text that is published, in bytes."""
ENGINE_ID = "{engine_id}"
"""Part of `certificate_name` in whose place the engine id stands."""
ADDRESSES_MAX = 8
"""Maximum number of addresses that are published."""


@dataclass(frozen=True)
class FleetConfig:
    """A registry of engines. Without one nothing is published and nothing is read."""

    registry: str = ""
    """Address of the registry: etcd://HOST:PORT,HOST:PORT, file:PATH, or one of `SCHEMES`; empty: none."""
    role: str = "both"
    """Part of a request that this engine plays: prefill, decode or both."""
    model: str = ""
    """Name of the model, which the entry shows and filters compare."""
    addresses: str = ""
    """Published addresses, best first, separated by commas; empty: the one that peers dial."""
    host: str = ""
    """Published name of the host; empty: the kernel's."""
    tenant: str = ""
    """Tenant that this engine serves; empty: all."""
    entry_ttl_s: int = 15
    """Time after which the entry of a lead goes that renews it no longer, in seconds."""
    check_every_s: float = 5.0
    """Time between two health checks of an engine, in seconds."""
    watch_offers: bool = True
    """True if leads are asked for their offers (WatchOffers) while pairs are asked for with the chain of a prompt."""
    certificate_name: str = ""
    """Name that the certificate of an engine's lead has, with `ENGINE_ID` in it; empty: the name of its address."""
    http: str = ""
    """HTTP addresses of engines, for Envoy: HOST:PORT, prefill=HOST:PORT or decode=HOST:PORT for those of that part, or
    ID=HOST:PORT for one engine, separated by commas; `{host}` stands for the lead's host. Empty: Envoy is not served.
    """
    prefix: str = "/kvgrpc/v1/engines/"
    """First part of the keys in etcd."""
    etcd_ca: str = ""
    """Path of the CAs that sign etcd; empty: etcd speaks plain text."""
    etcd_cert: str = ""
    """Path of the certificate chain that etcd is shown; empty: none."""
    etcd_key: str = ""
    etcd_user: str = ""
    etcd_password_file: str = ""
    """Path of a file with the password of `etcd_user`."""

    def check(self) -> None:
        """Raises InvalidRequest for a wrong field."""
        if self.registry and not self.members and not self.path and not self.found_by_library:
            known = ", ".join((ETCD, FILE, *(f"{scheme}://" for scheme in SCHEMES)))
            raise invalid("fleet.registry", f"{self.registry!r} begins with none of {known}, or names nothing")
        if self.role not in FLEET_ROLES:
            raise invalid("fleet.role", f"is one of {', '.join(FLEET_ROLES)}")
        for name in ("model", "host", "tenant"):
            value = getattr(self, name)
            if not value.isprintable() or len(value.encode(errors="replace")) > TEXT_BYTES_MAX:
                raise invalid(f"fleet.{name}", f"is printable text of at most {TEXT_BYTES_MAX} bytes")
        if len(self.published_addresses) > ADDRESSES_MAX:
            raise invalid("fleet.addresses", f"are at most {ADDRESSES_MAX}")
        for rule in self.http_rules.values():
            host, _, port = rule.rpartition(":")
            if not host or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
                raise invalid("fleet.http", f"{rule!r} is no HOST:PORT")
        before, found, after = self.certificate_name.partition(ENGINE_ID)
        if self.certificate_name and not (found and re.fullmatch(r"[A-Za-z0-9.-]*", before + after)):
            raise invalid("fleet.certificate_name", f"is a DNS name with {ENGINE_ID} in it, once")
        if not isinstance(self.watch_offers, bool):
            raise invalid("fleet.watch_offers", "is true or false")
        self._check_times()
        self._check_etcd()

    def _check_times(self) -> None:
        if not _within(self.entry_ttl_s, TTL_MIN_S, TTL_MAX_S) or self.entry_ttl_s != int(self.entry_ttl_s):
            raise invalid("fleet.entry_ttl_s", f"is a whole number from {TTL_MIN_S} to {TTL_MAX_S}")
        if not _within(self.check_every_s, CHECK_MIN_S, CHECK_MAX_S):
            raise invalid("fleet.check_every_s", f"is from {CHECK_MIN_S:g} to {CHECK_MAX_S:g}")

    def _check_etcd(self) -> None:
        if not self.prefix.startswith("/") or not self.prefix.endswith("/") or len(self.prefix) > TEXT_BYTES_MAX:
            raise invalid("fleet.prefix", f"begins and ends with /, and has at most {TEXT_BYTES_MAX} characters")
        if bool(self.etcd_cert) != bool(self.etcd_key) or (self.etcd_cert and not self.etcd_ca):
            raise invalid("fleet.etcd_cert", "needs etcd_key and etcd_ca")
        if bool(self.etcd_user) != bool(self.etcd_password_file):
            raise invalid("fleet.etcd_user", "needs etcd_password_file, and the reverse")

    @property
    def members(self) -> tuple[str, ...]:
        """Members (host:port) of etcd; empty if the registry is no etcd."""
        if not self.registry.startswith(ETCD):
            return ()
        named = self.registry.removeprefix(ETCD).rstrip("/").split(",")
        return tuple(one for one in named if one)

    @property
    def http_rules(self) -> dict[str, str]:
        """Rules of `http` by engine id or part; the empty id has the one for all others."""
        rules = (one.strip().rpartition("=") for one in self.http.split(",") if one.strip())
        return {engine_id: rule for engine_id, _, rule in rules}

    @property
    def path(self) -> str:
        """Path of the file of entries; empty if the registry is no file."""
        return self.registry.removeprefix(FILE).removeprefix("//") if self.registry.startswith(FILE) else ""

    @property
    def found_by_library(self) -> bool:
        """True if the registry is one whose library is an extra."""
        scheme, found, rest = self.registry.partition("://")
        return bool(found) and scheme in SCHEMES and bool(rest or scheme == LEASES)

    @property
    def published_addresses(self) -> tuple[str, ...]:
        """Addresses that are stated for the entry."""
        return tuple(one.strip() for one in self.addresses.split(",") if one.strip())


def _within(value: object, least: float, most: float) -> bool:
    """Returns whether a value of the file is a number within bounds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
