"""gRPC's wait for its sockets: a server reads them in the waiting thread, unless its operator chose otherwise."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvgrpc.service.polling import VARIABLE
from tests.service.engines import HOME, SMALL_POOL, Engine, ServeProcess

TRACE = {"GRPC_TRACE": "event_engine_endpoint", "GRPC_VERBOSITY": "debug"}
"""Makes gRPC log the work of its event engine, which has threads of its own for that."""


def reads_by_engine(folder: Path, environment: dict[str, str]) -> bool:
    """Returns whether a server with this environment reads its callers' sockets in its event engine."""
    process = ServeProcess(folder, "--listen", f"{HOME}:0", *SMALL_POOL, environment=TRACE | environment, fresh=True)
    with contextlib.closing(Engine(process)) as engine:
        engine.check_alive()
        log = process.log
    assert "event_engine_endpoint" in log, f"this gRPC has no such trace:\n{log}"
    return "posix_endpoint" in log


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    if VARIABLE in os.environ:
        monkeypatch.delenv(VARIABLE)


def test_a_server_reads_its_sockets_in_the_thread_that_waits_for_them(tmp_path: Path) -> None:
    assert not reads_by_engine(tmp_path, {})


def test_what_the_operator_says_of_it_stays_even_if_it_is_empty(tmp_path: Path) -> None:
    assert reads_by_engine(tmp_path, {VARIABLE: ""})


def test_a_process_that_only_imports_the_library_has_it_as_it_was() -> None:
    imports = "import os, kvgrpc.client, kvgrpc.engine, kvgrpc.server"
    command = [sys.executable, "-c", f"{imports}; print(os.environ.get({VARIABLE!r}, 'unset'))"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "unset\n"
