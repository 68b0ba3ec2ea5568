"""A lead with few descriptors, and processes that only connect to its session socket."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvgrpc.v1 import admin_pb2
from tests.engine.support import Lead, Side
from tests.service.api import Api
from tests.service.engines import wait_until

LIMIT = 128
WITHIN = ("bash", "-c", f'ulimit -n {LIMIT}; exec "$@"', "--")
STRANGERS = LIMIT


@pytest.fixture
def lead(tmp_path: Path) -> Iterator[Lead]:
    """It may have few open files."""
    made = Lead(tmp_path, "P", within=WITHIN)
    yield made.wait_ready()
    made.close()


def test_processes_that_only_connect_leave_descriptors_to_all_others_and_one_line_in_the_log(lead: Lead) -> None:
    with ExitStack() as stack:
        strangers = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(STRANGERS)]
        for stranger in strangers:
            stranger.connect(lead.socket_path)
        wait_until(lambda: "wait: this process may have" in lead.process.log)
        api = Api(lead.process.wait_ready()["address"])  # by a connection of its own
        stack.callback(api.close)
        assert api.admin.GetStatus(admin_pb2.GetStatusRequest()).header.engine_id == "P"
        assert strangers[0].recv(1_024) == b"", "it was let in, and sent away when it said nothing"
    side = Side(lead)
    assert side.engine.poll() == []
    side.close()
    assert lead.process.log.count("wait: this process may have") == 1
    lead.process.check_log()


def test_a_server_takes_all_open_files_that_the_system_allows(tmp_path: Path) -> None:
    within = ("bash", "-c", f'ulimit -Sn {LIMIT}; exec "$@"', "--")
    lead = Lead(tmp_path, "P", within=within).wait_ready()
    (row,) = [
        line for line in Path(f"/proc/{lead.process.pid}/limits").read_text().splitlines() if "open files" in line
    ]
    soft, hard = row.split()[3:5]
    assert soft == hard
    lead.close()
