"""SIGHUP lets a running server take other settings from its file."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.client import connect_sync
from kvgrpc.errors import KVGrpcError, PermissionDenied
from tests.client.serving import Served, served
from tests.service.engines import wait_until

WAIT_S = 20.0
NOBODY = "127.0.0.1:1"


class Reloadable:
    """A server with a file, and its log."""

    def __init__(self, file: Path, log: Path, served: Served) -> None:
        self._file, self._log, self.served = file, log, served

    def reload(self, text: str) -> str:
        """Gives the server another file and a signal. Returns what the log says of it."""
        seen = len(self._log.read_text())
        self._file.write_text(text)
        self.served.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "reloaded: " in self.said(seen), WAIT_S)
        return self.said(seen)

    def said(self, seen: int) -> str:
        return self._log.read_text()[seen:]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Reloadable]:
    file, log = tmp_path / "settings.toml", tmp_path / "log"
    file.write_text('dial_allow = ["localhost"]\n')
    with log.open("w") as stderr, served("--config", str(file), "--log-level", "info", stderr=stderr) as made:
        yield Reloadable(file, log, made)


def refused(address: str) -> bool:
    """Returns whether the server at this address may not dial."""
    with connect_sync(address) as client:
        try:
            client.connect_peer(NOBODY)
        except PermissionDenied:
            return True
        except KVGrpcError:
            return False
    return False


def test_a_signal_lets_another_dial_list_hold_and_leaves_leases_alone(server: Reloadable) -> None:
    address = server.served.address
    assert refused(address)
    with connect_sync(address) as client:
        taken = client.allocate(1)
        server.reload('dial_allow = ["127.0.0.0/8"]\n')
        assert not refused(address)
        assert client.finished_blocks(taken, list(range(16)))


def test_a_signal_changes_the_level_and_the_form_of_the_log(server: Reloadable) -> None:
    said = server.reload('dial_allow = ["localhost"]\nlog_format = "json"\n')
    (line,) = (line for line in said.splitlines() if "reloaded: " in line)
    assert json.loads(line)["message"] == "reloaded: log_format"


def test_a_signal_changes_how_long_a_call_waits(server: Reloadable) -> None:
    with connect_sync(server.served.address) as client:
        server.reload('dial_allow = ["localhost"]\n[limits]\nwait_s = 0.5\n')
        assert client.capabilities().limits.wait.ToMilliseconds() == 500


def test_the_log_names_settings_that_wait_for_a_restart(server: Reloadable) -> None:
    said = server.reload('dial_allow = ["localhost"]\nread_blocks = true\n[limits]\nlease_ttl_s = 7\n')
    assert "no setting has changed" in said
    wait_until(lambda: "hold after a restart: " in server.said(0), WAIT_S)
    assert "read_blocks" in server.said(0)
    assert "limits.lease_ttl_s" in server.said(0)


def test_a_file_with_an_error_changes_nothing(server: Reloadable) -> None:
    server.reload('dial_allow = ["127.0.0.0/8"]\ndrain_s = 1\n')
    said = server.reload('dial_allow = ["localhost"]\nno_such_setting = 1\n')
    assert "no_such_setting" in said
    assert not refused(server.served.address)
