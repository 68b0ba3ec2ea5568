"""The registry that the settings name, to publish and to read."""

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import grpc

from kvgrpc.config_errors import invalid
from kvgrpc.config_fleet import FleetConfig
from kvgrpc.fleet.entry import EngineEntry
from kvgrpc.registry.addresses import LEASES, publisher_at, registry_at
from kvgrpc.registry.base import Registry
from kvgrpc.registry.etcd import EtcdPublication, EtcdRegistry, EtcdSettings
from kvgrpc.registry.files import FileRegistry
from kvgrpc.registry.introductions import Introduce

SECRET_BYTES_MAX = 65_536
"""Maximum size of a file with a password, a key or certificates, in bytes."""


class Published(Protocol):
    """One entry in a registry."""

    published: asyncio.Event
    failure: str
    """Reason why the registry lacks the entry; empty: it has it, or nothing was tried yet."""

    def update(self, entry: EngineEntry) -> None:
        """Publishes another value of the same life, soon."""

    async def run(self) -> None:
        """Publishes the entry and renews it. It never ends by itself."""

    async def withdraw(self) -> None: ...


def registry_of(fleet: FleetConfig, introduce: Introduce) -> Registry | None:
    """Returns the registry to read; None: there is none. Raises InvalidRequest for a file or an address that is not
    usable, and for an extra that is not installed.
    """
    if fleet.members:
        return EtcdRegistry(etcd_of(fleet))
    if fleet.found_by_library:
        return registry_at(fleet.registry, introduce, os.environ)
    return FileRegistry(Path(fleet.path)) if fleet.path else None


def publisher_of(fleet: FleetConfig) -> Callable[[EngineEntry], Published] | None:
    """Returns what publishes an entry; None: nobody publishes in this registry. Raises as `registry_of`."""
    if fleet.members:
        return partial(EtcdPublication, etcd_of(fleet))
    if fleet.registry.startswith(f"{LEASES}://"):
        return publisher_at(fleet.registry, os.environ, fleet.entry_ttl_s)
    return None


def etcd_of(fleet: FleetConfig) -> EtcdSettings:
    """Returns the addresses and the credentials of etcd. Raises InvalidRequest for a file that is not usable."""
    credentials = None
    if fleet.etcd_ca:
        key, chain = (_read(name, getattr(fleet, name)) for name in ("etcd_key", "etcd_cert"))
        credentials = grpc.ssl_channel_credentials(_read("etcd_ca", fleet.etcd_ca), key, chain)
    password = _read("etcd_password_file", fleet.etcd_password_file) or b""
    return EtcdSettings(
        fleet.members,
        credentials,
        user=fleet.etcd_user,
        password=password.decode(errors="replace").rstrip("\r\n"),
        ttl_s=fleet.entry_ttl_s,
        prefix=fleet.prefix,
    )


def _read(name: str, path: str) -> bytes | None:
    """Returns the content of a file; None: no path is stated. Raises InvalidRequest."""
    if not path:
        return None
    try:
        with Path(path).open("rb") as file:
            data = file.read(SECRET_BYTES_MAX + 1)
    except OSError as error:
        raise invalid(f"fleet.{name}", f"{path}: {error.strerror or error}") from error
    if len(data) > SECRET_BYTES_MAX:
        raise invalid(f"fleet.{name}", f"{path} has more than {SECRET_BYTES_MAX} bytes")
    return data
