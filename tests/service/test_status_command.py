"""`kvgrpc status` shows one server for people, and the same as JSON."""

import json
import re
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvgrpc.cli.app import app
from kvgrpc.v1 import transfer_pb2
from tests.service.conftest import Start
from tests.service.engines import Engine, wait_until
from tests.service.values import prompt

TOKENS = prompt(32)
COLUMNS = 80
"""Width of the terminal in columns. Rows are longer, and are neither cut nor broken."""


def status(address: str, *flags: str) -> Result:
    return CliRunner(env={"COLUMNS": str(COLUMNS)}).invoke(app, ["status", address, *flags])


def shown(engine: Engine) -> str:
    """Returns the output for people. Fails unless the exit code is 0."""
    result = status(engine.address)
    assert result.exit_code == 0, result.output
    return result.stdout


def said(engine: Engine) -> dict[str, Any]:
    """Returns the output for programs."""
    result = status(engine.address, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def pool_map(text: str) -> str:
    """Returns the pool map, with one character for each block."""
    return "".join(re.findall(r"^[.aLATQ]+$", text, re.MULTILINE))


def row(text: str, first: str) -> list[str]:
    """Returns the cells of the table row that begins with `first`."""
    (line,) = (line for line in text.splitlines() if line.strip().startswith(first))
    return re.split(r"\s{2,}", line.strip())


def test_an_idle_server_has_a_map_of_free_blocks_and_nothing_else(source: Engine) -> None:
    text = shown(source)
    assert text.startswith(f"{source.engine_id} at {source.address}, version ")
    assert "admission open" in text
    assert "data paths: shm" in text
    blocks = source.counts().block_count
    assert f"pool group full: {blocks} blocks, {blocks} free" in text
    assert pool_map(text) == "." * blocks
    assert "leases: none" in text


def test_allocated_blocks_have_a_letter_of_their_own_and_a_legend(source: Engine) -> None:
    source.allocate(2)
    text = shown(source)
    assert pool_map(text).startswith("aa.")
    assert ". free  a allocated" in text


@pytest.fixture
def waiting(source: Engine, destination: Engine) -> tuple[str, str]:
    """Makes a lease that is read, an unread one, and a pull that waits for a step. Returns the first and last id."""
    handed = source.hand_over(TOKENS, request_id="chat-7")
    source.hand_over(TOKENS, request_id="chat-8")
    pulled = destination.pull(
        handed.grant, TOKENS, destination.allocate(2), after_step=1, request_id="chat-7"
    ).transfer_id
    wait_until(lambda: destination.get(pulled).waiting_for == transfer_pb2.WAITING_FOR_STEP)
    return handed.lease.lease_id, pulled


def test_blocks_leases_transfers_peers_are_shown(source: Engine, destination: Engine, waiting: tuple[str, str]) -> None:
    lease_id, transfer_id = waiting
    at_source, at_destination = shown(source), shown(destination)
    assert pool_map(at_source).startswith("AALL.")
    assert pool_map(at_destination).startswith("TT.")
    assert "leases: 2" in at_source
    lease = row(at_source, lease_id)
    assert (lease[1:3], lease[4:6]) == (["chat-7", "2"], ["0 of 1", "1"])
    transfer = row(at_destination, transfer_id)
    assert transfer[1:6] == ["receive", "pending", "held", "chat-7", source.engine_id]
    assert transfer[-1] == "step"
    peer = row(at_destination, source.engine_id + " " * 2)
    assert peer[:4] == [source.engine_id, source.address, "connected", "shm"]
    assert peer[-1] == "1"


def test_programs_get_the_messages_of_the_api(source: Engine, destination: Engine, waiting: tuple[str, str]) -> None:
    lease_id, transfer_id = waiting
    found = said(source)
    asked = {"status", "engine", "description", "capabilities"}
    assert set(found) == asked | {"pool", "leases", "transfers", "peers", "pins", "allocations"}
    assert found["status"]["counts"]["lease_count"] == "2"
    assert lease_id in {lease["lease_id"] for lease in found["leases"]["leases"]}
    assert transfer_id in {pin["owner"] for pin in said(destination)["pins"]["pins"]}


def test_a_server_without_a_pool_is_shown_too(start: Start) -> None:
    (engine,) = start(("--no-pool",))
    assert "admission no_engine (no engine is attached)" in shown(engine)
    assert said(engine)["pool"] is None


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_server_that_cannot_be_reached_is_an_error_with_a_way_out(flags: tuple[str, ...]) -> None:
    result = status("127.0.0.1:1", "--timeout-s", "0.5", *flags)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "GetStatus at 127.0.0.1:1" in result.stderr
    assert "kvgrpc serve --listen 127.0.0.1:1" in result.stderr
