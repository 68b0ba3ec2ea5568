"""Two leads under mutual TLS: they meet, move blocks, and go on while their certificates change."""

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvgrpc.client import Client, connect
from kvgrpc.config import Config, PoolConfig
from kvgrpc.config_security import TlsConfig
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import Reason, Unavailable
from kvgrpc.server import Server
from kvgrpc.service import file_watch
from kvgrpc.service.rpc import health
from kvgrpc.tls import Tls, TlsFiles
from kvgrpc.v1 import handshake_pb2
from tests.tls.authority import Authority
from tests.tls.pulls import pull

CA = Authority()
SMALL = PoolConfig(layers=2, kv_heads=1, head_dim=8, blocks=64)


@asynccontextmanager
async def serving(
    files: TlsFiles, engine_id: str, advertise: str = "localhost:0", port: int = 0
) -> AsyncIterator[Server]:
    """Serves an engine under TLS on the name of its certificate."""
    config = Config(
        listen=f"127.0.0.1:{port}", advertise=advertise, engine_id=engine_id, pool=SMALL, data_paths=("shm",),
        tls=TlsConfig(dir=str(files.cert.parent)), limits=Limits(peer_grace_s=2.0),
    )  # fmt: skip
    server = Server(config)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def caller(server: Server, files: TlsFiles) -> Client:
    """Returns a client that shows the files' certificate."""
    return connect(server.address, credentials=Tls(files).channel_credentials())


@pytest.fixture
def folders(tmp_path: Path) -> tuple[TlsFiles, TlsFiles, TlsFiles]:
    """Files of P, of D and of a router."""
    p, d, router = (CA.issue(tmp_path / name) for name in ("p", "d", "router"))
    return p, d, router


def free_port() -> int:
    """Returns a port that nobody has at the moment."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class Relay:
    """A port that relays connections to another one, and knows which are open."""

    def __init__(self, to: int) -> None:
        self.to = to
        """The other port."""
        self.opened = 0
        self.open = 0

    async def __aenter__(self) -> "Relay":
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened, self.open = self.opened + 1, self.open + 1
        there, back = await asyncio.open_connection("127.0.0.1", self.to)
        ends = [asyncio.create_task(self._copy(reader, back)), asyncio.create_task(self._copy(there, writer))]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        back.close()
        writer.close()
        self.open -= 1
        await asyncio.gather(*ends, return_exceptions=True)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


async def test_two_leads_under_tls_move_blocks(folders: tuple[TlsFiles, TlsFiles, TlsFiles]) -> None:
    of_p, of_d, router = folders
    async with serving(of_p, "p") as p, serving(of_d, "d") as d, caller(p, router) as at_p, caller(d, router) as at_d:
        await pull(at_p, at_d)


async def test_health_tells_that_the_tls_files_cannot_be_used_and_nothing_else_changes(
    folders: tuple[TlsFiles, TlsFiles, TlsFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_watch, "LOOK_S", 0.02)
    monkeypatch.setattr(health, "LOOK_S", 0.02)
    of_p, _, router = folders
    usable = of_p.key.read_bytes()
    async with serving(of_p, "p") as p, caller(p, router) as at_p:
        asked = health_pb2_grpc.HealthStub(at_p.channel)

        async def told(serving_status: int) -> None:
            async with asyncio.timeout(20):
                async for reply in asked.Watch(health_pb2.HealthCheckRequest(service=health.TLS)):
                    if reply.status == serving_status:
                        return

        await told(health_pb2.HealthCheckResponse.SERVING)
        of_p.key.write_bytes(b"")
        await told(health_pb2.HealthCheckResponse.NOT_SERVING)
        whole = await asked.Check(health_pb2.HealthCheckRequest())
        assert whole.status == health_pb2.HealthCheckResponse.SERVING
        of_p.key.write_bytes(usable)
        await told(health_pb2.HealthCheckResponse.SERVING)


async def test_a_plain_caller_gets_nothing_of_a_server_under_tls(
    folders: tuple[TlsFiles, TlsFiles, TlsFiles],
) -> None:
    async with serving(folders[0], "p") as p, connect(p.address) as plain:
        with pytest.raises(Unavailable):
            await plain.allocate(1)


async def test_a_lead_of_another_ca_is_not_met(folders: tuple[TlsFiles, TlsFiles, TlsFiles], tmp_path: Path) -> None:
    of_p, _, router = folders
    stranger = Authority("another CA").issue(tmp_path / "stranger")
    async with (
        serving(of_p, "p") as p, serving(stranger, "d") as d,
        caller(p, router) as at_p, caller(d, stranger) as at_d,
    ):  # fmt: skip
        for client, other in ((at_p, d), (at_d, p)):
            with pytest.raises(Unavailable) as refused:
                await client.connect_peer(other.address)
            assert refused.value.reason is Reason.PEER_UNREACHABLE
            assert "of a CA that this client does not trust" in refused.value.message


async def test_certificates_and_ca_change_under_pulls_and_none_is_lost(
    folders: tuple[TlsFiles, TlsFiles, TlsFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First everybody trusts both CAs, then everybody gets a certificate of the new one, then the old one goes."""
    monkeypatch.setattr(file_watch, "LOOK_S", 0.05)
    of_p, of_d, router = folders
    following = Authority("the next CA")
    async with serving(of_p, "p") as p, serving(of_d, "d") as d:
        async with caller(p, router) as at_p, caller(d, router) as at_d:
            over = False

            async def pulls() -> int:
                for count in itertools.count():
                    if over:
                        return count
                    await pull(at_p, at_d)
                raise AssertionError

            async def changed(server: Server, files: TlsFiles, count: int) -> None:
                async with asyncio.timeout(20):
                    assert server.tls is not None
                    while server.tls.changes < count:  # noqa: ASYNC110 - a thread looks at the files
                        await asyncio.sleep(0.01)

            running = [asyncio.create_task(pulls()) for _ in range(3)]
            for step, trusted in enumerate((CA.pem + following.pem, CA.pem + following.pem, following.pem), 1):
                for server, files in ((p, of_p), (d, of_d)):
                    if step == 2:
                        following.issue(files.cert.parent)
                    files.ca.write_bytes(trusted)
                    await changed(server, files, step)
            over = True
            assert all(count > 0 for count in await asyncio.gather(*running))
        with pytest.raises(Unavailable):
            async with caller(p, router) as late:
                await late.allocate(1)
        following.issue(router.cert.parent)
        async with caller(p, router) as at_p, caller(d, router) as at_d:
            await pull(at_p, at_d)


async def test_a_lead_goes_over_to_a_new_connection_to_its_peer_and_the_peer_stays_connected(
    folders: tuple[TlsFiles, TlsFiles, TlsFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_watch, "LOOK_S", 0.05)
    of_p, of_d, router = folders
    relay = Relay(free_port())
    async with relay, serving(of_p, "p", f"localhost:{relay.port}", relay.to), serving(of_d, "d") as d:
        router_at_p = connect(f"localhost:{relay.to}", credentials=Tls(router).channel_credentials())
        async with router_at_p as at_p, caller(d, router) as at_d:
            await pull(at_p, at_d)
            assert (relay.opened, relay.open) == (1, 1)
            CA.issue(of_d.cert.parent)
            async with asyncio.timeout(30):
                while relay.opened < 2 or relay.open > 1:  # noqa: ASYNC110 - the leads' own times decide
                    await asyncio.sleep(0.02)
            await pull(at_p, at_d)
            assert (relay.opened, relay.open) == (2, 1)
            (peer,) = (await at_d.peers()).peers
            assert peer.state == handshake_pb2.PEER_STATE_CONNECTED
