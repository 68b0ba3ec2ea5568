"""Versions of kvgrpc whose processes meet in these tests: this tree's, and that of the wheel which SKEW_WHEEL names."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.service.conftest import SETTINGS, SHARED
from tests.service.engines import Engine, ServeProcess

WHEEL = "SKEW_WHEEL"
"""Name of the environment variable with the wheel's path: `make skew-test` sets it."""
PROGRAM_S = 120.0
"""Timeout of a program that drives two servers, in seconds."""


@dataclass(frozen=True)
class Version:
    """A version of the package. Its processes are of this Python and use what is installed beside this tree."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, *arguments: str) -> str:
        """Runs Python with this version, and returns what it prints."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("KVGRPC_", "OTEL_"))}
        env = clean | dict(self.environment)
        done = subprocess.run(
            [sys.executable, *arguments], env=env, timeout=PROGRAM_S, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


TREE = Version("tree")


def unpacked(wheel: Path, folder: Path) -> Version:
    """Returns the version in a wheel, which is unpacked into a folder as an installation would do."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    # PYTHONPATH comes before what is installed, and PYTHONSAFEPATH keeps this tree's own folder out.
    version = Version("wheel", {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"})
    where = version.run("-c", "import kvgrpc; print(kvgrpc.__file__)")
    assert Path(where.strip()).is_relative_to(folder), f"{wheel} does not hide the tree's package: {where}"
    return version


@contextmanager
def serving(version: Version, folder: Path, *flags: str) -> Iterator[Engine]:
    """Runs a server of a version."""
    process = ServeProcess(folder, *SHARED, *flags, settings=SETTINGS, environment=version.environment)
    try:
        engine = Engine(process)
        yield engine
        engine.api.close()
    finally:
        process.end()
