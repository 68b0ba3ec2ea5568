"""Words of the command line for what goes wrong, and what it says while it works."""

import json
import os
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvgrpc.client import connect_sync
from kvgrpc.config import Config
from kvgrpc.config_sources import load
from tests.client.serving import served
from tests.service.engines import wait_until


def run(*arguments: str) -> tuple[int, str, str]:
    """Runs the command. Returns its exit code, its output and its errors."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVGRPC_")}
    done = subprocess.run(
        [sys.executable, "-m", "kvgrpc", *arguments], capture_output=True, text=True, check=False, env=environment
    )
    return done.returncode, done.stdout, done.stderr


def test_a_port_in_use_is_said_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, _, said = run("serve", "--port", str(port), "--blocks", "16")
    assert (code, said) == (3, f"kvgrpc serve: cannot bind 127.0.0.1:{port}: Address already in use\n")


@pytest.mark.parametrize("command", ["status", "get leases"])
@pytest.mark.parametrize(
    "wrong", [("http://127.0.0.1:50051",), ("127.0.0.1:99999",), ("127.0.0.1:50051", "--timeout-s", "-1")]
)
def test_an_address_that_is_not_host_and_port_and_a_time_that_is_none_are_refused_before_a_call(
    command: str, wrong: tuple[str, ...]
) -> None:
    code, _, said = run(*command.split(), *wrong)
    assert (code, "Traceback" in said) == (2, False)


@pytest.mark.parametrize("scheme", ["dns:", "dns:///", "ipv4:"])
def test_an_address_may_be_a_target_of_grpc(scheme: str, unused_tcp_port: int) -> None:
    code, _, said = run("status", f"{scheme}127.0.0.1:{unused_tcp_port}")
    assert (code, "not host:port" in said) == (1, False)


@pytest.mark.parametrize("command", ["drain", "get leases", "describe lease l"])
def test_a_server_that_is_not_reached_is_told_with_how_to_start_one(command: str, unused_tcp_port: int) -> None:
    address = f"127.0.0.1:{unused_tcp_port}"
    code, shown, said = run(*command.split(), address)
    expected = (1, "", [f"Is a server running there? Start one with: kvgrpc serve --listen {address}"])
    assert (code, shown, said.splitlines()[1:]) == expected


def test_the_screen_needs_a_terminal() -> None:
    assert run("top") == (2, "", "kvgrpc top: needs a terminal; kvgrpc get engines lists the same once\n")


def test_a_server_of_something_else_is_not_taken_for_one_that_is_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = [sys.executable, "-m", "kvgrpc", "status", f"127.0.0.1:{port}"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as status:
            other.settimeout(60)
            while status.poll() is None:
                try:
                    connection, _ = other.accept()
                except TimeoutError:
                    break
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                other.settimeout(1)
            assert status.stderr is not None
            said = status.stderr.read()
    assert "no gRPC server" in said
    assert "Start one" not in said


def test_the_version_names_what_it_runs_on() -> None:
    code, said, _ = run("--version")
    assert code == 0
    expected = ["protocol", "Python", "grpcio", "protobuf", "numpy", "torch", "nixl-cu12"]
    assert [line.split()[0] for line in said.splitlines()[1:]] == expected


def test_a_checked_configuration_is_printed_as_it_takes_effect_and_can_be_given_again(tmp_path: Path) -> None:
    file = tmp_path / "given.toml"
    file.write_text('dial_allow = ["10.0.0.0/8"]\n[pool]\nblocks = 7\n')
    code, said, _ = run("serve", "--check", "--config", str(file), "--drain-s", "3")
    assert code == 0
    assert (tomllib.loads(said)["pool"]["blocks"], tomllib.loads(said)["drain_s"]) == (7, 3.0)
    again = tmp_path / "again.toml"
    again.write_text(said)
    given: Config = load(file, {}, {"drain_s": 3.0})
    assert load(again, {}, {}) == given


def test_a_configuration_that_cannot_be_is_refused_when_it_is_checked() -> None:
    code, _, said = run("serve", "--check", "--dial-allow", "10.0.0.0/99")
    assert (code, "dial_allow: '10.0.0.0/99' is neither a host nor" in said) == (2, True)


def test_a_server_says_what_it_waits_for_and_stops_at_once_when_told_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    flags = ("--drain-s", "600", "--log-level", "info", "--log-format", "json")
    with log.open("w") as file, served(*flags, stderr=file) as server:
        with connect_sync(server.address) as client:
            handed = client.finished_blocks(client.allocate(1), list(range(16)), ttl_s=600)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "draining" in log.read_text())
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    assert "draining for at most 600 s: 1 transfers and 1 leases are going on; a second signal" in log.read_text()
    assert "1 leases end with the server" in log.read_text()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for work in (f"transfer {handed.transfer.transfer_id}", f"lease {handed.lease.lease_id}"):
        named = [line["message"] for line in lines if f"in progress: {work}" in line["message"]]
        assert [" of '" in said for said in named] == [True, True], work
    moving = [line["transfer_id"] for line in lines if "in progress: transfer" in line["message"]]
    assert moving == [handed.transfer.transfer_id] * 2
