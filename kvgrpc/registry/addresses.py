"""The registry at an address, for those whose libraries are extras."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from kvgrpc.errors import invalid
from kvgrpc.registry.base import Registry
from kvgrpc.registry.introductions import Introduce
from kvgrpc.registry.kubernetes.settings import SERVICE_ACCOUNT, KubernetesSettings, in_cluster

DNS = ("dns", "dns+srv")
SLICES, LEASES = "kubernetes", "kubernetes-leases"
SCHEMES = (*DNS, SLICES, LEASES)
"""Beginnings of the addresses, before ://."""


def registry_at(
    address: str, introduce: Introduce, environment: Mapping[str, str], account: Path = SERVICE_ACCOUNT
) -> Registry:
    """Returns the registry of dns:///NAME:PORT, dns+srv:///NAME, kubernetes://NAMESPACE?selector=LABELS or
    kubernetes-leases://NAMESPACE. Without a namespace it is the pod's. `account` is the folder of its service account.
    Raises InvalidRequest, also for an extra that is not installed.
    """
    scheme = address.partition("://")[0]
    if scheme not in SCHEMES:
        raise invalid("registry", f"{address!r} begins with none of {', '.join(f'{one}://' for one in SCHEMES)}")
    try:
        if scheme in DNS:
            return _dns(address, introduce)
        return _kubernetes(address, introduce, in_cluster(environment, account))
    except ImportError as error:
        extra = "dns" if scheme in DNS else "kubernetes"
        raise invalid("registry", f"{scheme}:// needs a library: pip install 'kvgrpc[{extra}]'") from error


def _dns(address: str, introduce: Introduce) -> Registry:
    from kvgrpc.registry.dns import DnsRegistry, dns_settings

    return DnsRegistry(dns_settings(address), introduce)


def _kubernetes(address: str, introduce: Introduce, settings: KubernetesSettings) -> Registry:
    from kvgrpc.registry.kubernetes.lease_registry import LeaseRegistry
    from kvgrpc.registry.kubernetes.slice_registry import SliceChoice, SliceRegistry

    parts = urlsplit(address)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    known = {"selector", "port", "domain"} if parts.scheme == SLICES else set[str]()
    if unknown := options.keys() - known:
        raise invalid("registry", f"{address!r} has no option {', '.join(sorted(unknown))}")
    if parts.scheme == SLICES and not options.get("selector"):
        raise invalid("registry", f"{address!r} names no Services: ?selector=app.kubernetes.io/name=kvgrpc")
    if parts.path not in {"", "/"}:
        raise invalid("registry", f"{address!r} has a path")
    if parts.netloc:
        settings = replace(settings, namespace=parts.netloc)
    if parts.scheme == LEASES:
        return LeaseRegistry(settings)
    return SliceRegistry(settings, SliceChoice(**options), introduce)
