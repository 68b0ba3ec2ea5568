"""A server with identities, and callers of it with certificates of their own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import grpc.aio
from cryptography import x509

from kvgrpc.client import Client, connect
from kvgrpc.config import Config, PoolConfig
from kvgrpc.config_security import IdentityConfig, TlsConfig
from kvgrpc.core.values.limits import Limits
from kvgrpc.server import Server
from kvgrpc.tls import Tls, TlsFiles
from tests.tls.authority import Authority

CA = Authority()
SMALL = PoolConfig(layers=2, kv_heads=1, head_dim=8, blocks=64)
ROLES = ("engine", "peer", "rank", "router", "operator", "viewer")


def spiffe(name: str) -> str:
    """Returns the id of a caller."""
    return f"spiffe://test/{name}"


class Dialled(Protocol):
    """A server of any kind."""

    address: str


class People:
    """The certificates of a test, in a folder, and its file of roles."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.roles = folder / "roles.toml"
        self.roles.write_text("")

    def files(self, name: str) -> TlsFiles:
        """Returns the files of a caller, whose certificate it signs when it is asked first."""
        place = self.folder / name.replace("/", "-")
        if place.exists():
            return TlsFiles.in_folder(place)
        return CA.issue(place, (x509.UniformResourceIdentifier(spiffe(name)), x509.DNSName("localhost")))

    def give(self, **rows: str) -> None:
        """Writes the file of roles: of each caller its roles, and its tenant behind `@`."""
        text = []
        for name, said in rows.items():
            roles, _, tenant = said.partition("@")
            text.append(
                f'[[callers]]\nname = "{spiffe(name)}"\nroles = {roles.split()}\n'
                + (f'tenant = "{tenant}"\n' if tenant else "")
            )
        self.roles.write_text("\n".join(text))

    def channel(self, server: Dialled, name: str) -> grpc.aio.Channel:
        """Returns a channel that shows the caller's certificate."""
        return grpc.aio.secure_channel(server.address, Tls(self.files(name)).channel_credentials())

    def client(self, server: Dialled, name: str, **options: Any) -> Client:
        """Returns a client that shows the caller's certificate."""
        return connect(server.address, credentials=Tls(self.files(name)).channel_credentials(), **options)


@asynccontextmanager
async def serving(people: People, engine_id: str, *, roles: bool = True, **settings: Any) -> AsyncIterator[Server]:
    """Serves an engine under TLS, which is a caller of that name at others."""
    given: dict[str, Any] = {
        "listen": "127.0.0.1:0", "advertise": "localhost:0", "engine_id": engine_id, "pool": SMALL,
        "data_paths": ("shm",), "tls": TlsConfig(dir=str(people.files(engine_id).cert.parent)),
        "limits": Limits(peer_grace_s=2.0),
        "identity": IdentityConfig(roles=str(people.roles) if roles else ""),
    }  # fmt: skip
    server = Server(Config(**(given | settings)))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
