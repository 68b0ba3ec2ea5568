"""A client that lives longer than its files: which connection its calls take, and what becomes of the former one."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from kvgrpc.client import Client, Credentials, connect, reloading
from kvgrpc.tls import Tls, TlsFiles
from kvgrpc.v1 import handshake_pb2
from kvgrpc.v1.handshake_pb2_grpc import HandshakeServiceStub
from tests.client.fake import FakeServer
from tests.tls.authority import Authority

CA, FOREIGN = Authority(), Authority("a foreign CA")
PATIENCE_S = 20.0


class Caller:
    """A server under TLS, and one client whose files are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.server = folder / "client", FakeServer()
        self._files = CA.issue(folder / "server", [x509.DNSName("localhost")])
        self.server.answers = {"GetCapabilities": self._who, "WatchEngine": self._watched}
        self._name = ""

    async def serve(self) -> None:
        """Starts the server, again if it has stopped."""
        await self.server.start(Tls(self._files).server_credentials())

    def connect(self) -> Client:
        return connect(f"localhost:{self.server.port}", credentials=Credentials(dir=self.folder))

    def renew(self, name: str, authority: Authority = CA) -> None:
        """Gives the client a certificate with this name. It trusts the server's CA all the same."""
        files: TlsFiles = authority.issue(self.folder, [x509.DNSName(name)])
        files.ca.write_bytes(CA.pem)

    async def name(self, client: Client) -> str:
        """Makes a call, and returns the name that it was made under."""
        await client.capabilities()
        return self._name

    async def until(self, client: Client, name: str) -> None:
        """Makes calls until they are made under this name."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.name(client) != name:
                pass  # each call is one more look at the files

    def _who(self, asked: Any, context: Any) -> handshake_pb2.GetCapabilitiesResponse:
        self._name = context.auth_context()["x509_subject_alternative_name"][0].decode()
        return handshake_pb2.GetCapabilitiesResponse()

    async def _watched(self, asked: Any, context: Any) -> AsyncIterator[handshake_pb2.WatchEngineResponse]:
        while True:
            yield handshake_pb2.WatchEngineResponse()
            await asyncio.sleep(0.01)


@pytest.fixture
def caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Caller:
    monkeypatch.setattr(reloading, "FILES_LOOK_S", 0.0)
    made = Caller(tmp_path)
    made.renew("first")
    return made


async def test_calls_go_over_to_renewed_files_and_a_stream_goes_on(caller: Caller) -> None:
    await caller.serve()
    async with caller.connect() as client:
        assert await caller.name(client) == "first"
        stream = HandshakeServiceStub(client.channel).WatchEngine(
            handshake_pb2.WatchEngineRequest(), timeout=PATIENCE_S
        )
        await stream.read()
        caller.renew("second")
        await caller.until(client, "second")
        assert isinstance(await stream.read(), handshake_pb2.WatchEngineResponse)
    await caller.server.stop()


async def test_the_last_stream_of_a_former_connection_ends_with_its_client(caller: Caller) -> None:
    await caller.serve()
    async with caller.connect() as client:
        stream = HandshakeServiceStub(client.channel).WatchEngine(
            handshake_pb2.WatchEngineRequest(), timeout=PATIENCE_S
        )
        await stream.read()
        caller.renew("second")
        await caller.until(client, "second")
    assert stream.cancelled()
    await caller.server.stop()


async def test_files_that_are_not_usable_leave_the_last_ones_for_new_connections(caller: Caller) -> None:
    await caller.serve()
    async with caller.connect() as client:
        assert await caller.name(client) == "first"
        for name in ("tls.key", "ca.crt"):
            (caller.folder / name).write_text("-----BEGIN")
        await caller.server.stop()
        await caller.serve()
        await caller.until(client, "first")
    await caller.server.stop()


async def test_files_that_the_server_does_not_trust_cost_a_connected_client_no_call(caller: Caller) -> None:
    await caller.serve()
    async with caller.connect() as client:
        assert await caller.name(client) == "first"
        caller.renew("foreign", FOREIGN)
        for _ in range(20):
            assert await caller.name(client) == "first"
        caller.renew("second")
        await caller.until(client, "second")
    await caller.server.stop()


async def test_a_client_without_a_connection_takes_the_new_files_at_once(caller: Caller) -> None:
    await caller.serve()
    async with caller.connect() as client:
        caller.renew("second")
        assert await caller.name(client) == "second"
    await caller.server.stop()
