"""`kvgrpc doctor` says what is in the way, and what to do about it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509

from tests.client.serving import served
from tests.tls.authority import Authority

Found = dict[str, str]


def doctor(*arguments: str) -> tuple[int, list[Found]]:
    """Runs the command. Returns its exit code and its findings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVGRPC_")}
    command = [sys.executable, "-m", "kvgrpc", "doctor", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert not done.stderr, done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def of(found: list[Found], subject: str) -> list[tuple[str, str]]:
    return [(one["grade"], one["says"]) for one in found if one["subject"] == subject]


def configured(tmp_path: Path, text: str) -> str:
    file = tmp_path / "kvgrpc.toml"
    file.write_text(f'listen = "127.0.0.1:0"\n{text}')
    return str(file)


def test_the_way_between_two_servers_is_tried_both_ways_and_measured() -> None:
    with served("--engine-id", "P") as p, served("--engine-id", "D") as d:
        code, found = doctor(p.address, d.address, "--measure")
        assert code == 0
        for one, other in ((p, d), (d, p)):
            said = of(found, f"{one.address} to {other.address}")
            assert {grade for grade, _ in said} == {"ok"}
            assert any(text.startswith("shm") for _, text in said)
            assert any("GB/s" in text for _, text in said)
        assert ("ok", True) in [(grade, "P, version" in text) for grade, text in of(found, p.address)]


def test_a_server_that_is_not_there_is_an_error_and_no_end_of_the_look() -> None:
    with served("--engine-id", "P") as p:
        code, found = doctor("127.0.0.1:1", p.address)
    assert code == 1
    assert [grade for grade, _ in of(found, "127.0.0.1:1")] == ["error"]
    assert [grade for grade, _ in of(found, p.address)] == ["ok"]


def test_a_refused_dial_is_told_with_the_setting_that_refuses_it() -> None:
    with served("--engine-id", "P", "--dial-allow", "10.0.0.0/8") as p, served("--engine-id", "D") as d:
        code, found = doctor(p.address, d.address)
    (refused,) = (one for one in found if one["subject"] == f"{p.address} to {d.address}")
    assert (code, refused["grade"], refused["remedy"]) == (1, "error", "add it to dial_allow")


def test_servers_whose_data_paths_have_nothing_in_common_are_told_apart(tmp_path: Path) -> None:
    with served("--engine-id", "P", "--data-paths", "shm") as p, served("--engine-id", "D", "--data-paths", "cma") as d:
        code, found = doctor(p.address, d.address)
    assert code == 1
    assert "error" in [grade for grade, _ in of(found, f"{p.address} to {d.address}")]


@pytest.mark.parametrize(
    ("names", "grade", "says"),
    [
        ([x509.DNSName("p.example")], "ok", "this server is p.example"),
        ([x509.UniformResourceIdentifier("spiffe://example/p")], "error", "and no host"),
    ],
)
def test_a_certificate_is_judged_by_whom_it_names(
    tmp_path: Path, names: list[x509.DNSName | x509.UniformResourceIdentifier], grade: str, says: str
) -> None:
    Authority().issue(tmp_path / "own", names)
    _, found = doctor("--config", configured(tmp_path, f'[tls]\ndir = "{tmp_path / "own"}"\n'))
    assert any(one == grade and says in text for one, text in of(found, "tls"))


def test_a_missing_certificate_and_a_pool_that_does_not_fit_are_errors(tmp_path: Path) -> None:
    file = configured(tmp_path, f'[tls]\ndir = "{tmp_path}"\n[pool]\nblocks = 100000000\n')
    code, found = doctor("--config", file)
    assert code == 1
    assert ["error"] == [grade for grade, _ in of(found, "tls")] == [grade for grade, _ in of(found, "memory")]


def test_a_taken_port_is_a_warning_because_the_server_may_run_already() -> None:
    with served("--engine-id", "P") as p:
        environment = os.environ | {"KVGRPC_LISTEN": p.address}
        command = [sys.executable, "-m", "kvgrpc", "doctor"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert f"listen {p.address}: Address already in use" in done.stdout
    assert done.returncode == 0
