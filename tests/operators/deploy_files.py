"""The Containerfile and the unit of `deploy`, by hadolint and by systemd's own checks. Nothing is started."""

import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.operators.programs import Missing, Programs

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CONTAINERFILE = DEPLOY / "container/Containerfile"
UNIT = DEPLOY / "systemd/kvgrpc@.service"
EXPOSURE_MAX = 2.1
"""Maximum exposure of the unit, from 0 to 10, as `systemd-analyze security` adds it up. docs/operating.md has it."""
INSTALLED = "/opt/kvgrpc/bin/kvgrpc"
"""Command of the unit, in whose place the checks have one that is there."""


def check(programs: Programs, folder: Path) -> tuple[float, list[str]]:
    """Returns the exposure of the unit, and what is wrong with the files. Raises Missing."""
    wrong = [*_lines([str(programs.need("hadolint")), "--no-color", str(CONTAINERFILE)])]
    exposure, more = of_unit(programs, UNIT.read_text(), folder)
    return exposure, [*wrong, *more]


def of_unit(programs: Programs, text: str, folder: Path) -> tuple[float, list[str]]:
    """Returns the exposure of a unit, and what is wrong with it. Raises Missing."""
    if not programs.systemd_analyze.exists():
        raise Missing(f"it is not at {programs.systemd_analyze}: Debian's package systemd has it")
    unit, analyze = folder / "kvgrpc@checked.service", str(programs.systemd_analyze)
    unit.write_text(text.replace(INSTALLED, "/bin/true"))
    wrong = list(_lines([analyze, "verify", "--man=no", str(unit)]))
    said = _said([analyze, "security", "--offline=true", "--no-pager", str(unit)])
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", said)
    assert found, said
    exposure = float(found[1])
    if exposure > EXPOSURE_MAX:
        wrong.append(f"the exposure of the unit is {exposure}, at most {EXPOSURE_MAX}")
    return exposure, wrong


def _lines(command: Sequence[str]) -> Iterator[str]:
    yield from filter(None, (line.strip() for line in _said(command).splitlines()))


def _said(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return done.stdout + done.stderr
