"""Findings of `kvgrpc doctor` on machines that are unlike this one."""

import ast
import inspect
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvgrpc.cli import machine_findings, peer_findings
from kvgrpc.cli.machine_findings import Finding, Grade
from kvgrpc.config import Config
from kvgrpc.datapath.host import host_memory
from kvgrpc.datapath.nixl import load

UNLIMITED = resource.RLIM_INFINITY
GRADES = {f"Grade.{grade.name}" for grade in Grade}


def only(found: Iterator[Finding], says: str) -> Finding:
    """Returns the one finding that says so."""
    (one,) = (finding for finding in found if says in finding.says)
    return one


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def limit(most: int) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (most, most))

    return limit


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    def made(*names: str) -> None:
        for name in names:
            (tmp_path / name).mkdir()
        monkeypatch.setattr(machine_findings, "_RDMA", tmp_path if names else tmp_path / "none")

    return made


def test_every_finding_that_is_not_good_has_a_remedy() -> None:
    without = []
    for module in (machine_findings, peer_findings):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding":
                grade = ast.unparse(node.args[0])
                assert grade in GRADES or len(node.args) == 4, ast.unparse(node)
                if grade != "Grade.OK" and len(node.args) < 4:
                    without.append(ast.unparse(node))
    assert without == []
    with pytest.raises(AssertionError):
        Finding(Grade.NOTE, "clock", "it is late")


def test_the_memory_that_rdma_locks_must_not_be_limited(
    limited: Callable[[int], None], devices: Callable[..., None]
) -> None:
    devices("mlx5_1", "mlx5_0")
    limited(UNLIMITED)
    found = list(machine_findings.nixl({}))
    assert {finding.grade for finding in found} == {Grade.OK}
    assert only(iter(found), "RDMA devices").says == "RDMA devices: mlx5_0, mlx5_1"
    limited(65_536)
    locked = only(machine_findings.nixl({}), "at most 65536 bytes may be locked")
    assert (locked.grade, "LimitMEMLOCK" in locked.remedy) == (Grade.WARNING, True)


def test_a_machine_without_rdma_may_limit_what_is_locked(
    limited: Callable[[int], None], devices: Callable[..., None]
) -> None:
    devices()
    limited(65_536)
    assert "container" in only(machine_findings.nixl({"UCX_TLS": "tcp"}), "no RDMA device").remedy
    assert only(machine_findings.nixl({"UCX_TLS": "tcp"}), "UCX_TLS=tcp").remedy == "unset UCX_TLS, unless meant"
    assert not [finding for finding in machine_findings.nixl({}) if "locked" in finding.says]


@pytest.mark.parametrize(
    ("found", "grade", "says"),
    [
        (["POSIX", "UCX"], Grade.OK, "NIXL finds POSIX, UCX, of which UCX is used"),
        (["POSIX"], Grade.WARNING, "NIXL finds POSIX, and UCX would be used"),
        ([], Grade.WARNING, "NIXL finds no back end, and UCX would be used"),
    ],
)
def test_the_back_ends_of_nixl_are_named_with_the_one_that_is_used(
    found: list[str], grade: Grade, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "backends", lambda: found)
    assert only(machine_findings.nixl({}), "NIXL finds").grade is grade
    assert only(machine_findings.nixl({}), says)


def test_nixl_finds_the_back_end_that_is_used() -> None:
    assert load.BACKEND in load.backends()


@pytest.mark.parametrize(
    ("scope", "grade"), [("0", Grade.OK), ("1", Grade.OK), ("2", Grade.WARNING), ("3", Grade.WARNING), ("", Grade.OK)]
)
def test_yama_says_who_may_read_the_memory_of_others(
    scope: str, grade: Grade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ptrace_scope"
    if scope:
        file.write_text(f"{scope}\n")
    monkeypatch.setattr(machine_findings, "_YAMA", file)
    (finding,) = machine_findings.processes()
    assert finding.grade is grade
    assert finding.remedy.startswith("sysctl kernel.yama.ptrace_scope=1" if grade is Grade.WARNING else "")


@pytest.mark.parametrize(("most", "grade"), [(64, Grade.WARNING), (65_536, Grade.OK), (UNLIMITED, Grade.OK)])
def test_few_descriptors_are_told_with_the_connections_that_fit(
    most: int, grade: Grade, limited: Callable[[int], None]
) -> None:
    limited(most)
    (finding,) = machine_findings.descriptors(Config())
    assert (finding.grade, "24 connections fit" in finding.says) == (grade, grade is Grade.WARNING)


@pytest.mark.parametrize(
    ("status", "grade"), [(0, Grade.OK), (0x2001, Grade.OK), (0x40, Grade.NOTE), (None, Grade.NOTE)]
)
def test_a_clock_that_nothing_keeps_right_is_told(
    status: int | None, grade: Grade, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_findings, "_clock_status", lambda: status)
    (finding,) = machine_findings.clock()
    assert (finding.grade, "NTP" in finding.remedy) == (grade, grade is Grade.NOTE)


def test_memory_that_cannot_be_known_is_told_with_what_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available", lambda: None)
    (finding,) = machine_findings.memory(Config())
    assert (finding.grade, "compare" in finding.remedy) == (Grade.NOTE, True)
