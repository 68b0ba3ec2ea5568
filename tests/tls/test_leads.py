"""Two leads under mutual TLS: they meet, move blocks, and go on while their certificates change."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvgrpc.client import Client, connect, move
from kvgrpc.config import Config, PoolConfig, TlsConfig
from kvgrpc.errors import Reason, Unavailable
from kvgrpc.server import Server
from kvgrpc.service import tls_watch
from kvgrpc.tls import Tls, TlsFiles
from tests.tls.authority import Authority

CA = Authority()
SMALL = PoolConfig(layers=2, kv_heads=1, head_dim=8, blocks=64)


@asynccontextmanager
async def serving(files: TlsFiles, engine_id: str) -> AsyncIterator[Server]:
    """Serves an engine under TLS on the name of its certificate."""
    config = Config(
        listen="127.0.0.1:0", advertise="localhost:0", engine_id=engine_id, pool=SMALL, data_paths=("shm",),
        tls=TlsConfig(dir=str(files.cert.parent)),
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


async def pull(p: Client, d: Client) -> None:
    """Moves two blocks from P to D, and frees them."""
    taken = await p.allocate(2, ttl_s=60)
    moved = await move(p, d, taken, list(range(32)))
    await d.free(moved.blocks)
    await p.free(taken)


async def test_two_leads_under_tls_move_blocks(folders: tuple[TlsFiles, TlsFiles, TlsFiles]) -> None:
    of_p, of_d, router = folders
    async with (
        serving(of_p, "p") as p, serving(of_d, "d") as d,
        caller(p, router) as at_p, caller(d, router) as at_d,
    ):  # fmt: skip
        await pull(at_p, at_d)


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


async def test_certificates_and_ca_change_under_pulls_and_none_is_lost(
    folders: tuple[TlsFiles, TlsFiles, TlsFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First everybody trusts both CAs, then everybody gets a certificate of the new one, then the old one goes."""
    monkeypatch.setattr(tls_watch, "LOOK_S", 0.05)
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
