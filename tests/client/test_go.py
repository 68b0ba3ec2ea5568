"""The Go sample drives a real pull: a scheduler in another language needs only the schema."""

import asyncio
import re
import secrets
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvgrpc.client import connect
from kvgrpc.v1.transfer_pb2 import TRANSFER_STATE_ACTIVE, WatchTransfersResponse
from tests.client.serving import served

GO = shutil.which("go")
HERE = Path(__file__).parent.parent.parent / "clients" / "go"
UNTIL_S = 60
# A build with an empty cache takes one to two minutes.
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(GO is None, reason="go is not on the PATH"),
]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    binary = tmp_path_factory.mktemp("go") / "demo"
    subprocess.run([str(GO), "build", "-o", binary, "./samples/demo"], cwd=HERE, check=True)
    return binary


async def run(demo: Path, *arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        demo, *arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, limit=1 << 20
    )
    output, _ = await asyncio.wait_for(process.communicate(), UNTIL_S)
    return process.returncode or 0, output.decode()


@asynccontextmanager
async def proxy(port: int) -> AsyncIterator[tuple[int, set[asyncio.StreamWriter]]]:
    """Forwards a port to another one. Yields the port and the open connections, which a test may cut."""
    open_: set[asyncio.StreamWriter] = set()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
        open_.add(writer)
        await asyncio.gather(forward(reader, there_writer), forward(there_reader, writer))
        open_.discard(writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], open_
    finally:
        server.close()
        for writer in open_:
            writer.transport.abort()


async def test_the_sample_drives_a_pull_in_one_trace(demo: Path) -> None:
    trace_id = secrets.token_hex(16)
    with served("--engine-id", "P") as source, served("--engine-id", "D") as destination:
        status, output = await run(
            demo,
            *("-prefill", source.address, "-decode", destination.address, "-blocks", "5"),
            *("-traceparent", f"00-{trace_id}-00f067aa0ba902b7-01"),
        )
        assert status == 0, output
        for address in (source.address, destination.address):
            async with connect(address) as client:
                (transfer,) = (await client.list_transfers(trace_id=trace_id)).transfers
                assert transfer.block_count == 5
                assert (await client.pool_status()).groups[0].allocated_block_count == 0
    assert "by DATA_PATH_SHM" in output
    assert "PIN_KIND_LEASE of 5 blocks" in output
    assert "TRANSFER_STATE_SUCCEEDED: 5 blocks" in output
    assert all(f"phase   {name}" in output for name in ("OPEN", "WIRE", "SETTLE"))


@pytest.mark.slow
def test_vet_finds_nothing() -> None:
    subprocess.run([str(GO), "vet", "./..."], cwd=HERE, check=True)


@pytest.mark.slow
async def test_the_sample_resumes_a_watch_that_breaks(demo: Path) -> None:
    """The connection is cut while bytes move. The bandwidth limit makes the pull take two seconds."""
    slow = ("--bandwidth-limit-bytes-per-s", "65536")
    with served("--engine-id", "P") as source, served("--engine-id", "D", *slow) as destination:
        async with proxy(destination.port) as (port, connections), connect(destination.address) as client:
            start = await client.capabilities()
            running = asyncio.ensure_future(
                run(demo, "-prefill", source.address, "-decode", f"127.0.0.1:{port}", "-blocks", "32")
            )
            async for event in client.watch(after=start.header):
                if isinstance(event, WatchTransfersResponse) and event.transfer.state == TRANSFER_STATE_ACTIVE:
                    break
            for writer in list(connections):
                writer.transport.abort()
            status, output = await running
    assert status == 0, output
    changes = [int(number) for number in re.findall(r"^change +(\d+):", output, re.MULTILINE)]
    assert changes == list(range(changes[0], changes[0] + len(changes))), "none is missing, and none comes twice"
    assert "TRANSFER_STATE_SUCCEEDED: 32 blocks" in output


@pytest.mark.slow
async def test_the_sample_says_why_it_failed(demo: Path) -> None:
    with served() as source, served() as destination:
        status, output = await run(demo, "-prefill", source.address, "-decode", destination.address, "-blocks", "1000")
    assert status == 1
    assert "OUT_OF_RANGE LIMIT_EXCEEDED" in output
