"""The registry at an address, for those whose libraries are extras."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

from kvgrpc.errors import invalid
from kvgrpc.fleet.entry import EngineEntry
from kvgrpc.registry.base import Registry
from kvgrpc.registry.introductions import Introduce
from kvgrpc.registry.kubernetes.settings import SERVICE_ACCOUNT, KubernetesSettings, in_cluster

if TYPE_CHECKING:
    from kvgrpc.registry.kubernetes.lease_publication import LeasePublication

DNS = ("dns", "dns+srv")
SLICES, LEASES = "kubernetes", "kubernetes-leases"
SCHEMES = (*DNS, SLICES, LEASES)
"""Beginnings of the addresses, before ://."""
_OPTIONS = {SLICES: {"selector", "port", "domain", "account"}, LEASES: {"account"}}


def registry_at(address: str, introduce: Introduce, environment: Mapping[str, str]) -> Registry:
    """Returns the registry of dns:///NAME:PORT, dns+srv:///NAME, kubernetes://NAMESPACE?selector=LABELS or
    kubernetes-leases://NAMESPACE. Without a namespace it is the pod's. Raises InvalidRequest, also for an extra that is
    not installed.
    """
    scheme = _scheme(address)
    if scheme in DNS:
        with _extra("dns", scheme):
            from kvgrpc.registry.dns import DnsRegistry, dns_settings
        return DnsRegistry(dns_settings(address), introduce)
    settings, options = _kubernetes(address, environment)
    with _extra("kubernetes", scheme):
        from kvgrpc.registry.kubernetes.lease_registry import LeaseRegistry
        from kvgrpc.registry.kubernetes.slice_registry import SliceChoice, SliceRegistry
    if scheme == LEASES:
        return LeaseRegistry(settings)
    return SliceRegistry(settings, SliceChoice(**options), introduce)


def publisher_at(
    address: str, environment: Mapping[str, str], ttl_s: int
) -> "Callable[[EngineEntry], LeasePublication]":
    """Returns what publishes an entry at kubernetes-leases://NAMESPACE, for `ttl_s` seconds without a renewal. The
    variables POD_NAME and POD_UID name the owner of the Lease. Raises as `registry_at`.
    """
    if _scheme(address) != LEASES:
        raise invalid("registry", f"in {address!r} nobody publishes: only {LEASES}:// has entries that leads write")
    settings, _ = _kubernetes(address, environment)
    with _extra("kubernetes", _scheme(address)):
        from kvgrpc.registry.kubernetes.lease_publication import LeaseHolder, LeasePublication
    holder = LeaseHolder(environment.get("POD_NAME", ""), environment.get("POD_UID", ""), ttl_s)
    return lambda entry: LeasePublication(settings, entry, holder)


def _scheme(address: str) -> str:
    scheme = address.partition("://")[0]
    if scheme not in SCHEMES:
        raise invalid("registry", f"{address!r} begins with none of {', '.join(f'{one}://' for one in SCHEMES)}")
    return scheme


@contextmanager
def _extra(extra: str, scheme: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise invalid("registry", f"{scheme}:// needs a library: pip install 'kvgrpc[{extra}]'") from error


def _kubernetes(address: str, environment: Mapping[str, str]) -> tuple[KubernetesSettings, dict[str, str]]:
    """Returns who calls which API server, and the options of an address beside that."""
    parts = urlsplit(address)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := options.keys() - _OPTIONS[parts.scheme]:
        raise invalid("registry", f"{address!r} has no option {', '.join(sorted(unknown))}")
    if parts.scheme == SLICES and not options.get("selector"):
        raise invalid("registry", f"{address!r} names no Services: ?selector=app.kubernetes.io/name=kvgrpc")
    if parts.path not in {"", "/"}:
        raise invalid("registry", f"{address!r} has a path")
    settings = in_cluster(environment, Path(options.pop("account", "") or SERVICE_ACCOUNT))
    return replace(settings, namespace=parts.netloc or settings.namespace), options
