"""`kvgrpc drain` tells a server to take no new work, and shows what is still going on."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvgrpc.client import connect
from kvgrpc.errors import PreconditionFailed, Reason
from kvgrpc.v1.common_pb2 import Grant
from kvgrpc.v1.transfer_pb2 import TRANSFER_STATE_SUCCEEDED
from tests.client.serving import Served, served

TOKENS = list(range(16))
UNTIL_S = 60.0


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
        code, said = await drain(server.address, "--reason", "a new kernel")
        head, *rows = said.splitlines()
        transfer, lease = handed_over.transfer.transfer_id, handed_over.lease.lease_id
        assert (code, head) == (
            0,
            f"P at {server.address}: admission draining ('a new kernel'); in progress: 1 transfers (the oldest is "
            f"{transfer}), 1 leases, 0 blocks in quarantine",
        )
        assert sorted(row.partition(", ends in")[0] for row in rows) == [
            f"  lease {lease} of 'anonymous', request ''",
            f"  transfer {transfer} (send, pending) of 'anonymous', request ''",
        ]
        assert all(", ends in " in row for row in rows)
        with pytest.raises(PreconditionFailed) as refused:
            await client.allocate(1)
        assert refused.value.reason is Reason.DRAINING
        await client.cancel(handed_over.transfer.transfer_id)
        await client.wait(handed_over.transfer.transfer_id, returned=True)
        _, said = await drain(server.address)
        assert "in progress: 0 transfers, 0 leases" in said


async def test_a_drain_that_is_taken_back_lets_new_work_in(server: Served) -> None:
    await drain(server.address)
    code, said = await drain(server.address, "--cancel")
    assert code == 0
    assert "admission open" in said
    async with connect(server.address) as client:
        await client.free(await client.allocate(1))


async def test_a_wait_shows_each_change_and_ends_when_nothing_is_in_progress(server: Served) -> None:
    async with connect(server.address) as client:
        handed_over = await client.finished_blocks(await client.allocate(1), TOKENS)
        command = [sys.executable, "-m", "kvgrpc", "drain", server.address, "--wait", "--json"]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        first = json.loads(await process.stdout.readline())
        assert (first["engine"], first["blocker_count"]) == ("P", 2)
        await client.cancel(handed_over.transfer.transfer_id)
        rest, _ = await process.communicate()
        assert process.returncode == 0
        assert json.loads(rest.splitlines()[-1])["blocker_count"] == 0


async def test_a_wait_for_a_server_that_takes_work_again_is_exit_code_1(server: Served) -> None:
    async with connect(server.address) as client:
        await client.finished_blocks(await client.allocate(1), TOKENS)
        waiting = asyncio.create_task(drain(server.address, "--wait"))
        while not (await client.get_drain()).drain.HasField("age"):  # noqa: ASYNC110 - a drain has no event
            await asyncio.sleep(0.01)
        await client.cancel_drain()
        code, said = await waiting
    assert code == 1
    assert "takes new work again" in said


async def test_transfers_under_way_while_a_drain_starts_all_succeed() -> None:
    pool = ("--drain-s", "0", "--blocks", "256")
    with served("--engine-id", "P", *pool) as one, served("--engine-id", "D", *pool) as other:
        async with connect(one.address) as source, connect(other.address) as destination:

            async def pulled(grant: Grant) -> int:
                got = await destination.pull(
                    grant, TOKENS, blocks=await destination.allocate(1), returned=True, timeout_s=UNTIL_S
                )
                return got.state

            grants = [(await source.finished_blocks(await source.allocate(1), TOKENS)).grant for _ in range(200)]
            pulls = [asyncio.create_task(pulled(grant)) for grant in grants]
            await asyncio.wait(pulls, return_when=asyncio.FIRST_COMPLETED)
            await source.start_drain()
            assert {await pull for pull in pulls} == {TRANSFER_STATE_SUCCEEDED}
            code, said = await drain(one.address, "--wait")
    assert code == 0
    assert said.splitlines()[-1].endswith("in progress: 0 transfers, 0 leases, 0 blocks in quarantine")


async def test_a_server_that_cannot_be_reached_is_exit_code_1(unused_tcp_port: int) -> None:
    code, said = await drain(f"127.0.0.1:{unused_tcp_port}", "--timeout-s", "2")
    assert code == 1
    assert said.startswith("kvgrpc drain: ")
