"""Bad input to a lead under TLS: it lets none of it in, goes on serving, and gives back what it spent."""

import asyncio
import contextlib
import resource
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509

from examples.certs import usual_names
from kvgrpc.client import Client, Credentials, connect
from kvgrpc.config import Config, PoolConfig
from kvgrpc.config_security import TlsConfig
from kvgrpc.errors import Reason, Unavailable
from kvgrpc.server import Server
from kvgrpc.service import file_watch
from kvgrpc.tls import TlsFiles
from tests.client.serving import served
from tests.tls.authority import Authority

CA = Authority()
SLOW = 1_000
"""Number of handshakes that never finish."""
HANDSHAKE_S = 3.0
BEGIN_OF_A_HELLO = bytes.fromhex("16030102000100")
GARBAGE = {
    "nothing": b"",
    "a call in plain text": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "http 1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "random": secrets.token_bytes(100_000),
    "half a hello": BEGIN_OF_A_HELLO,
    "a hello of random bytes": bytes.fromhex("1603010200") + secrets.token_bytes(512),
    "a record of 16 MiB": bytes.fromhex("160301ffff") + bytes(100_000),
    "a flood of alerts": bytes.fromhex("15030100020100") * 10_000,
    "data before a handshake": bytes.fromhex("1703030010") + bytes(16),
}


@asynccontextmanager
async def serving(files: TlsFiles, engine_id: str = "p") -> AsyncIterator[Server]:
    """Serves an engine under TLS on the name of its certificate."""
    pool, tls = PoolConfig(layers=2, kv_heads=1, head_dim=8, blocks=64), TlsConfig(dir=str(files.cert.parent))
    server = Server(
        Config(
            listen="127.0.0.1:0", advertise="localhost:0", engine_id=engine_id, data_paths=("shm",), pool=pool, tls=tls
        )
    )
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def caller(address: str, files: TlsFiles) -> Client:
    """Returns a client over a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    return connect(address, credentials=Credentials(dir=files.cert.parent), channel_options=options)


async def check_serves(address: str, files: TlsFiles) -> None:
    """Calls once over a new connection."""
    async with caller(address, files) as client:
        await client.free(await client.allocate(1))


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    """Files of the lead."""
    return CA.issue(tmp_path / "p")


@pytest.fixture
def router(tmp_path: Path) -> TlsFiles:
    return CA.issue(tmp_path / "router")


async def test_callers_with_bad_certificates_are_refused_and_others_are_served(
    files: TlsFiles, router: TlsFiles, tmp_path: Path
) -> None:
    foreign = Authority("a foreign CA").issue(tmp_path / "foreign")
    foreign.ca.write_bytes(CA.pem)
    bad = [
        CA.issue(tmp_path / "expired", ends=timedelta(seconds=-1)),
        CA.issue(tmp_path / "early", begins=timedelta(minutes=30)),
        foreign,
    ]
    async with serving(files) as server:
        for shown in bad:
            async with caller(server.address, shown) as client:
                with pytest.raises(Unavailable) as refused:
                    await client.allocate(1)
                assert "tls" in refused.value.metadata, refused.value
            await check_serves(server.address, router)


async def test_a_peer_of_another_name_is_not_met(files: TlsFiles, router: TlsFiles, tmp_path: Path) -> None:
    other = CA.issue(tmp_path / "d", [x509.DNSName("other.example")])
    async with serving(files) as p, serving(other, "d") as d, caller(p.address, router) as client:
        with pytest.raises(Unavailable) as refused:
            await client.connect_peer(d.address)
        assert refused.value.reason is Reason.PEER_UNREACHABLE
        await check_serves(p.address, router)


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_watch, "LOOK_S", 0.02)


async def until(is_so: Callable[[], bool]) -> None:
    """Waits until a thread of the server has looked at the files."""
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110 - a thread looks at the files
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("quick_looks")
async def test_callers_of_a_ca_that_was_removed_are_refused(files: TlsFiles, router: TlsFiles, tmp_path: Path) -> None:
    following = Authority("the next CA")
    late = following.issue(tmp_path / "late")
    late.ca.write_bytes(CA.pem)
    files.ca.write_bytes(CA.pem + following.pem)
    async with serving(files) as server:
        assert server.tls is not None
        await check_serves(server.address, late)
        files.ca.write_bytes(CA.pem)
        await until(lambda: server.tls is not None and server.tls.changes == 1)
        async with caller(server.address, late) as client:
            with pytest.raises(Unavailable):
                await client.allocate(1)
        await check_serves(server.address, router)


@pytest.mark.usefixtures("quick_looks")
async def test_files_that_are_half_written_change_nothing_until_they_are_whole(
    files: TlsFiles, router: TlsFiles, tmp_path: Path
) -> None:
    """A writer that takes its time, file by file, in the order that leaves the key of another for longest."""
    async with serving(files) as server:
        tls = server.tls
        assert tls is not None
        for round_, cut in enumerate((0, 1, 100, -1), 1):
            renewed = CA.issue(tmp_path / f"renewed-{round_}")
            for path in (files.key, files.cert):
                whole = renewed.cert.parent.joinpath(path.name).read_bytes()
                path.write_bytes(whole[:cut])
                await until(lambda: bool(tls.error))
                await check_serves(server.address, router)
                path.write_bytes(whole)
            await until(lambda n=round_: tls.changes == n)  # type: ignore[misc] # a default binds the loop's value
            assert tls.error == ""
            await check_serves(server.address, router)


async def test_bytes_that_are_no_handshake_are_ignored(files: TlsFiles, router: TlsFiles) -> None:
    async with serving(files) as server:
        for garbage in GARBAGE.values():
            _, writer = await asyncio.open_connection("localhost", int(server.address.rpartition(":")[2]))
            with contextlib.suppress(ConnectionError):
                writer.write(garbage)
                await writer.drain()
            await check_serves(server.address, router)
            writer.transport.abort()


async def test_a_client_under_tls_leaves_a_plain_server_as_it_was(router: TlsFiles) -> None:
    with served() as server:
        async with caller(server.address, router) as client:
            with pytest.raises(Unavailable):
                await client.allocate(1)
        async with connect(server.address) as plain:
            await plain.free(await plain.allocate(1))


@contextlib.contextmanager
def many_files() -> Iterator[None]:
    """Lets this process have as many open files as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def test_slow_handshakes_keep_no_caller_out_and_their_descriptors_come_back(tmp_path: Path) -> None:
    router, folder = CA.issue(tmp_path / "router"), CA.issue(tmp_path / "p", usual_names("p")).cert.parent
    limits = ("--limit", f"connect_timeout_s={HANDSHAKE_S}", "--limit", f"connections={2 * SLOW}")
    with many_files(), served("--tls-dir", str(folder), *limits) as server:
        await check_serves(server.address, router)
        before = descriptors(server.process.pid)
        slow = []
        try:
            for number in range(SLOW):
                one = socket.create_connection(("127.0.0.1", server.port))
                slow.append(one)
                with contextlib.suppress(ConnectionError):
                    one.sendall(BEGIN_OF_A_HELLO[: number % 8])
            await check_serves(server.address, router)
            async with asyncio.timeout(60):
                while descriptors(server.process.pid) > before + 10:  # noqa: ASYNC110 - the server's time decides
                    await asyncio.sleep(0.05)
            await check_serves(server.address, router)
        finally:
            for one in slow:
                one.close()
