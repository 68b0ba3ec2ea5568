"""The registry that the settings name, to publish and to read."""

from pathlib import Path

import grpc

from kvgrpc.config_errors import invalid
from kvgrpc.config_fleet import FleetConfig
from kvgrpc.registry.base import Registry
from kvgrpc.registry.etcd import EtcdRegistry, EtcdSettings
from kvgrpc.registry.files import FileRegistry

SECRET_BYTES_MAX = 65_536
"""Maximum size of a file with a password, a key or certificates, in bytes."""


def registry_of(fleet: FleetConfig) -> Registry | None:
    """Returns the registry to read; None: there is none. Raises InvalidRequest for a file that is not usable."""
    if fleet.members:
        return EtcdRegistry(etcd_of(fleet))
    return FileRegistry(Path(fleet.path)) if fleet.path else None


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
