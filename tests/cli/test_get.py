"""`kvgrpc get`, `describe`, `why`, `cancel` and `release` on running servers."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvgrpc.cli.listings import held_runs
from kvgrpc.client import connect_sync
from kvgrpc.v1.admin_pb2 import PIN_KIND_LEASE, Pin
from kvgrpc.v1.common_pb2 import BlockRuns, Blocks, GroupBlocks
from kvgrpc.v1.pool_pb2 import Allocation
from tests.cli.commands import run
from tests.client.serving import Served, served
from tests.service.engines import wait_until

TOKENS = list(range(32))
FORGED = "a\x1b]0;b\x07\n[/c]"
"""A text with a command to terminals, a second line, and markup that ends nothing."""


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Served, Served]]:
    with served("--engine-id", "P", "--drain-s", "0") as p, served("--engine-id", "D", "--drain-s", "0") as d:
        yield p, d


def test_rows_of_several_servers_are_told_apart_and_ids_are_whole(servers: tuple[Served, Served]) -> None:
    p, d = servers
    with connect_sync(p.address) as client:
        blocks = client.allocate(2, request_id="chat-7", label="test")
        handed = client.finished_blocks(blocks, TOKENS, request_id="chat-7")
        code, lines, _ = run("get", "leases", p.address, d.address)
        assert code == 0
        head, row = lines
        assert head.split()[:3] == ["LEASE", "ENGINE", "REQUEST"]
        assert row.split()[1:4] == ["P", "chat-7", "2"]
        assert run("get", "leases", p.address, "-o", "name")[1] == [row.split()[0]]
        (shown,) = (json.loads(line) for line in run("get", "transfers", p.address, "-o", "json")[1])
        assert (shown["engine"], shown["transfer_id"]) == ("P", handed.transfer.transfer_id)
        (engine, other) = run("get", "engines", p.address, d.address)[1][1:]
        assert (engine.split()[0], other.split()[0]) == ("P", "D")
        assert "chat-7" in run("get", "allocations", p.address)[1][1]
        client.release_lease(row.split()[0])
        client.free(blocks)


def test_who_holds_a_block_is_said_for_its_allocation_and_its_lease(servers: tuple[Served, Served]) -> None:
    p, _ = servers
    with connect_sync(p.address) as client:
        blocks = client.allocate(2, request_id="chat-8", label="test")
        client.finished_blocks(blocks, TOKENS, request_id="chat-8")
        block = blocks.blocks.groups[0].runs.starts[0]
        code, lines, _ = run("why", str(block), p.address)
        assert (code, len(lines)) == (0, 2)
        assert "by anonymous" in lines[0]
        assert "request chat-8, test" in lines[0]
        assert lines[1].startswith("pinned by lease")
        (held,) = (json.loads(line) for line in run("why", str(block), p.address, "-o", "json")[1])
        assert (held["allocations"][0]["request_id"], held["pins"][0]["kind"]) == ("chat-8", "PIN_KIND_LEASE")
        rows = [json.loads(line) for line in run("get", "blocks", p.address, "--json")[1]]
        assert [(row["first_block"], row["block_count"], row["kind"], row["request_id"]) for row in rows] == [
            (block, 2, kind, "chat-8") for kind in ("allocation", "lease")
        ]
        assert run("get", "blocks", p.address)[1][1].split()[:5] == [str(block), "P", "0", "2", "allocation"]
        assert run("why", "63", p.address)[1] == ["nobody holds block 63 of group 0"]
        assert run("why", "6300", p.address)[0] == 1
        client.free(blocks)


def test_a_lease_is_described_and_released_and_a_transfer_is_cancelled(servers: tuple[Served, Served]) -> None:
    p, _ = servers
    with connect_sync(p.address) as client:
        blocks = client.allocate(2)
        client.finished_blocks(blocks, TOKENS, request_id="chat-9")
        (lease,) = (line.split()[0] for line in run("get", "leases", p.address)[1] if "chat-9" in line)
        assert "request_id: chat-9" in run("describe", "lease", lease, p.address)[1]
        for kind in ("lease", "pin"):
            (shown,) = (json.loads(line) for line in run("describe", kind, lease, p.address, "-o", "json")[1])
            assert shown["request_id"] == "chat-9"
        assert run("release", lease, p.address)[1] == [f"{lease} is released; 2 blocks have no pin any more"]
        handed = client.finished_blocks(blocks, TOKENS)
        name = handed.transfer.transfer_id
        assert run("cancel", name, p.address)[1] == [f"{name} is cancelled"]
        lease = client.finished_blocks(blocks, TOKENS).lease.lease_id
        (freed,) = (json.loads(line) for line in run("release", lease, p.address, "--json")[1])
        assert freed["freed_blocks"]["groups"][0]["runs"]["counts"] == [2]
        name = client.finished_blocks(blocks, TOKENS).transfer.transfer_id
        (ended,) = (json.loads(line) for line in run("cancel", name, p.address, "--json")[1])
        assert ended["transfers"][0]["state"] == "TRANSFER_STATE_CANCELLED"
        client.free(blocks)


def test_an_engine_and_an_allocation_are_described_and_a_name_that_is_not_there_is_told(
    servers: tuple[Served, Served],
) -> None:
    p, _ = servers
    with connect_sync(p.address) as client:
        blocks = client.allocate(1, label="seen")
        assert "label: seen" in run("describe", "allocation", blocks.blocks.allocation_id, p.address)[1]
        client.free(blocks)
    code, lines, _ = run("describe", "engine", "P", p.address)
    assert code == 0
    assert {"admission: ADMISSION_OPEN", "limits:"} <= set(lines)
    for kind in ("engine", "pin", "allocation", "tensor"):
        code, _, said = run("describe", kind, "nobody", p.address)
        assert code == 1, kind
        assert "nobody" in said or kind == "tensor", said


def test_blocks_of_several_groups_are_listed_by_group_with_all_their_holders() -> None:
    def blocks(**runs: tuple[int, int]) -> Blocks:
        groups = [
            GroupBlocks(group=int(name[1:]), runs=BlockRuns(starts=[first], counts=[count]))
            for name, (first, count) in runs.items()
        ]
        return Blocks(groups=groups)

    made = held_runs(
        [Allocation(allocation_id="b", blocks=blocks(g2=(4, 3), g0=(9, 1)))],
        [Pin(kind=PIN_KIND_LEASE, owner="l", blocks=blocks(g2=(4, 2)))],
    )
    assert [(run.group, run.first_block, run.block_count, run.holder) for run in made] == [
        (0, 9, 1, "b"), (2, 4, 3, "b"), (2, 4, 2, "l"),
    ]  # fmt: skip


def test_a_peer_is_described_by_the_chosen_data_path_and_why_no_better_one_was_taken(
    servers: tuple[Served, Served],
) -> None:
    p, d = servers
    with connect_sync(p.address) as client, connect_sync(d.address) as other:
        client.connect_peer(d.address)
        name = other.status().header.engine_id
    code, (line,), _ = run("describe", "peer", name, p.address)
    assert code == 0
    assert f"rank 0 with rank 0 of {name} ({d.address}, connected): shm: same host" in line
    code, _, said = run("describe", "peer", "nobody", p.address)
    assert code == 1
    assert "there is no peer nobody" in said


def test_a_transfer_begins_with_the_line_of_its_data_path(servers: tuple[Served, Served]) -> None:
    p, d = servers
    with connect_sync(p.address) as client, connect_sync(d.address) as other:
        source, target = client.allocate(2), other.allocate(2)
        handed = client.finished_blocks(source, TOKENS)
        name = other.pull_blocks(handed.grant, TOKENS, blocks=target).transfer.transfer_id
        other.wait(name)
        code, (line, *fields), _ = run("describe", "transfer", name, d.address)
        assert code == 0
        engine_id = client.status().header.engine_id
        assert line.startswith(f"rank 0 with rank 0 of {engine_id} ({p.address}): shm: same host")
        assert f"transfer_id: {name}" in fields
        assert not any("why" in field for field in fields), "the reason is said once"
        client.free(source)
        other.free(target)


def test_a_server_that_is_gone_is_an_error_and_the_others_are_listed(servers: tuple[Served, Served]) -> None:
    code, lines, said = run("get", "engines", "127.0.0.1:1", servers[1].address)
    assert (code, len(lines)) == (1, 2)
    assert "127.0.0.1:1" in said


def test_a_watch_shows_what_is_new_until_it_is_interrupted(servers: tuple[Served, Served]) -> None:
    p, _ = servers
    command = [sys.executable, "-m", "kvgrpc", "get", "allocations", p.address, "-w"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch, connect_sync(p.address) as client:
        assert watch.stdout is not None
        assert watch.stdout.readline().startswith("ALLOCATION")
        blocks = client.allocate(1, label="seen")
        assert any("seen" in line for line in watch.stdout)
        watch.send_signal(signal.SIGINT)
        wait_until(lambda: watch.poll() is not None)
        client.free(blocks)


def test_what_callers_sent_neither_breaks_a_line_nor_commands_the_terminal(servers: tuple[Served, Served]) -> None:
    p, _ = servers
    with connect_sync(p.address) as client:
        blocks = client.allocate(2, request_id=FORGED, label=FORGED)
        lease = client.grant_lease(blocks, TOKENS, request_id=FORGED).lease.lease_id
        block = str(blocks.blocks.groups[0].runs.starts[0])
        lists = [("get", kind) for kind in ("leases", "allocations", "pins")]
        for command in (*lists, ("describe", "lease", lease), ("why", block), ("status",), ("drain",)):
            code, lines, _ = run(*command, p.address)
            assert code == 0, command
            assert all(line.isprintable() for line in lines), (command, lines)
            assert any("a\\x1b]0;b\\x07\\n[/c]" in line for line in lines), (command, lines)
        assert run("drain", "--cancel", p.address)[0] == 0
        client.release_lease(lease)
        client.free(blocks)
