"""TLS over real sockets: who gets in, and what a change of the files does to servers and channels."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509

from kvgrpc.tls import Tls, TlsFiles
from tests.tls.authority import Authority

CA = Authority()
METHOD = "/tests.Echo/Echo"


class _Echo(grpc.GenericRpcHandler):
    """Answers each call with the names of its caller."""

    def service(self, _: Any) -> Any:
        async def echo(request: bytes, context: Any) -> bytes:
            return b" ".join(context.peer_identities() or ()) + request

        return grpc.unary_unary_rpc_method_handler(echo)


@asynccontextmanager
async def serving(tls: Tls) -> AsyncIterator[str]:
    """Serves echoes under mutual TLS, and yields the address."""
    server = grpc.aio.server(handlers=[_Echo()])
    port = server.add_secure_port("127.0.0.1:0", tls.server_credentials())
    await server.start()
    try:
        yield f"localhost:{port}"
    finally:
        await server.stop(None)


def echo_of(channel: grpc.aio.Channel) -> Any:
    """Returns the method, for bytes."""
    return channel.unary_unary(METHOD)


async def answer(address: str, credentials: grpc.ChannelCredentials | None) -> bytes:
    """Calls once over a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options)
    async with channel:
        found: bytes = await echo_of(channel)(b"", timeout=20)
        return found


@pytest.fixture
def server_files(tmp_path: Path) -> TlsFiles:
    return CA.issue(tmp_path / "server")


@pytest.fixture
def client_files(tmp_path: Path) -> TlsFiles:
    return CA.issue(tmp_path / "client", [x509.UniformResourceIdentifier("spiffe://example/router")])


async def test_a_caller_is_known_by_the_names_of_its_certificate(
    server_files: TlsFiles, client_files: TlsFiles
) -> None:
    async with serving(Tls(server_files)) as address:
        assert await answer(address, Tls(client_files).channel_credentials()) == b"spiffe://example/router"


def _strangers(server: TlsFiles, folder: Path) -> Iterator[grpc.ChannelCredentials | None]:
    ca = server.ca.read_bytes()
    foreign = Authority("another CA").issue(folder / "foreign")
    yield None
    yield grpc.ssl_channel_credentials(ca)
    yield grpc.ssl_channel_credentials(ca, foreign.key.read_bytes(), foreign.cert.read_bytes())
    yield Tls(foreign).channel_credentials()


async def test_nobody_gets_in_without_a_certificate_of_the_ca(server_files: TlsFiles, tmp_path: Path) -> None:
    async with serving(Tls(server_files)) as address:
        for credentials in _strangers(server_files, tmp_path):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await answer(address, credentials)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_server_with_another_name_is_not_called(tmp_path: Path, client_files: TlsFiles) -> None:
    async with serving(Tls(CA.issue(tmp_path / "server", [x509.DNSName("other.example")]))) as address:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await answer(address, Tls(client_files).channel_credentials())
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_new_files_are_used_at_the_next_handshake_and_no_open_connection_ends(
    server_files: TlsFiles, client_files: TlsFiles
) -> None:
    """The CA changes, too: who still has a certificate of the old one is refused, but for who is connected."""
    tls, client = Tls(server_files), Tls(client_files)
    other = Authority("the next CA")
    async with serving(tls) as address, grpc.aio.secure_channel(address, client.channel_credentials()) as old:
        call = echo_of(old)
        await call(b"")
        other.issue(server_files.cert.parent)
        assert tls.look()
        with pytest.raises(grpc.aio.AioRpcError):
            await answer(address, client.channel_credentials())
        other.issue(client_files.cert.parent, [x509.UniformResourceIdentifier("spiffe://example/renewed")])
        assert client.look()
        assert await answer(address, client.channel_credentials()) == b"spiffe://example/renewed"
        assert await call(b"") == b"spiffe://example/router"


async def test_a_broken_update_refuses_nobody(server_files: TlsFiles, client_files: TlsFiles) -> None:
    tls = Tls(server_files)
    async with serving(tls) as address:
        shutil.copy(client_files.key, server_files.key)
        assert not tls.look()
        assert await answer(address, Tls(client_files).channel_credentials())


async def test_a_change_under_calls_loses_none(server_files: TlsFiles, client_files: TlsFiles) -> None:
    tls, client = Tls(server_files), Tls(client_files)
    async with serving(tls) as address:

        async def callers() -> int:
            found = [await answer(address, client.channel_credentials()) for _ in range(20)]
            return len(found)

        async def changes() -> None:
            for _ in range(10):
                CA.issue(server_files.cert.parent)
                assert tls.look()
                await asyncio.sleep(0)

        counts = await asyncio.gather(*(callers() for _ in range(4)), changes())
        assert counts[:4] == [20] * 4
