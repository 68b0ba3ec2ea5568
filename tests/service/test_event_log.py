"""The log of what an operator acts on."""

import json
import logging
from pathlib import Path

import pytest

from kvgrpc.client import connect_sync
from kvgrpc.core.node import Node
from kvgrpc.service.event_log import INTERVAL_S, LINES_OF_KIND, EventLog, LineBudget
from kvgrpc.service.runner import Runner
from tests.client.serving import served
from tests.service.engines import wait_until

TOKENS = list(range(16))


def test_a_failed_transfer_and_a_lost_peer_have_a_line_that_programs_can_read(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def lines() -> list[dict[str, str]]:
        return [json.loads(line) for line in log.read_text().splitlines()]

    flags = ("--log-level", "info", "--log-format", "json", "--limit", "peer_grace_s=1")
    with log.open("w") as file, served("--engine-id", "D", *flags, stderr=file) as destination:
        with (
            served("--engine-id", "P", "--drain-s", "0") as source,
            connect_sync(source.address) as p,
            connect_sync(destination.address) as d,
        ):
            handed = p.finished_blocks(p.allocate(1), TOKENS)
            moved = d.pull(handed.grant, TOKENS[::-1], blocks=d.allocate(1), request_id="chat-7")
            wait_until(lambda: any("is connected" in line["message"] for line in lines()))
        wait_until(lambda: any("is dead" in line["message"] for line in lines()))
    (failed,) = (line for line in lines() if "failed" in line["message"])
    assert failed["level"] == "warning"
    assert (failed["transfer_id"], failed["request_id"], failed["peer"]) == (moved.transfer_id, "chat-7", "P")
    assert "CONTENT_MISMATCH" in failed["message"]
    assert [line["peer"] for line in lines() if "states its weights" in line["message"]] == ["P"]


def test_what_a_caller_named_ends_no_line_and_begins_none(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        log.open("w") as file,
        served("--log-level", "info", "--drain-s", "0", stderr=file) as server,
        connect_sync(server.address) as client,
    ):
        handed = client.finished_blocks(client.allocate(1), TOKENS, request_id="a\nERROR forged")
        client.cancel(handed.transfer.transfer_id)
    (line,) = (line for line in log.read_text().splitlines() if "was cancelled" in line)
    assert line.endswith("request_id=a\\nERROR forged")
    assert "\nERROR" not in log.read_text()


def test_lines_about_ever_new_peers_are_of_one_kind(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(Runner(Node()), ("shm",))
    with caplog.at_level(logging.INFO):
        for number in range(LINES_OF_KIND + 5):
            log._peer(logging.INFO, f"engine-{number}@1", "connected", 0.0)
    assert len(caplog.records) == LINES_OF_KIND


def test_lines_of_one_kind_are_bounded_and_what_was_left_out_is_counted() -> None:
    budget = LineBudget()
    taken = [budget.take("failed", 0.0) for _ in range(LINES_OF_KIND + 5)]
    assert taken == [""] * LINES_OF_KIND + [None] * 5
    assert budget.take("other", 0.0) == ""
    assert budget.take("failed", INTERVAL_S) == " (5 more like it were not logged)"
    assert budget.take("failed", INTERVAL_S + 1) == ""
