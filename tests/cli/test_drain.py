"""`kvgrpc drain` tells a server to take no new work, and shows what is still going on."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvgrpc.client import connect
from kvgrpc.errors import PreconditionFailed, Reason
from tests.client.serving import Served, served

TOKENS = list(range(16))


@pytest.fixture
def server() -> Iterator[Served]:
    with served("--engine-id", "P", "--drain-s", "0") as made:
        yield made


async def drain(*arguments: str) -> tuple[int, str]:
    """Runs the command. Returns its exit code and output."""
    command = [sys.executable, "-m", "kvgrpc", "drain", *arguments]
    done = await asyncio.to_thread(
        subprocess.run, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.returncode, done.stdout


async def test_a_drained_server_refuses_new_work_and_shows_what_is_left_of_the_old(server: Served) -> None:
    async with connect(server.address) as client:
        taken = await client.allocate(1)
        handed_over = await client.finished_blocks(taken, TOKENS)
        code, said = await drain(server.address)
        assert (code, said.splitlines()) == (
            0,
            [
                f"P at {server.address}: admission draining; going on: 1 transfers (the oldest is "
                f"{handed_over.transfer.transfer_id}), 1 leases, 0 blocks in quarantine"
            ],
        )
        with pytest.raises(PreconditionFailed) as refused:
            await client.allocate(1)
        assert refused.value.reason is Reason.DRAINING
        await client.cancel(handed_over.transfer.transfer_id)
        await client.wait(handed_over.transfer.transfer_id, returned=True)
        _, said = await drain(server.address)
        assert "going on: 0 transfers, 0 leases" in said


async def test_a_drain_that_is_taken_back_lets_new_work_in(server: Served) -> None:
    await drain(server.address)
    code, said = await drain(server.address, "--cancel")
    assert code == 0
    assert "admission open" in said
    async with connect(server.address) as client:
        await client.free(await client.allocate(1))


async def test_a_server_that_cannot_be_reached_is_exit_code_1(unused_tcp_port: int) -> None:
    code, said = await drain(f"127.0.0.1:{unused_tcp_port}", "--timeout-s", "2")
    assert code == 1
    assert said.startswith("kvgrpc drain: ")
