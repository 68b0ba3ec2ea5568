"""The wheel is the same whenever and wherever it is built, and holds the package alone."""

import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import kvgrpc

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the wheel, which two builds made alike."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, str(ROOT / "scripts" / "wheel.py"), "--out", str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found


def test_two_builds_of_the_wheel_are_alike_and_hold_the_package_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name.partition("/")[0] for name in archive.namelist()}
    assert names == {"kvgrpc", f"kvgrpc-{kvgrpc.__version__}.dist-info"}


@pytest.mark.parametrize("extra", ["server", "vllm", "otel", "metrics", "etcd", "kubernetes", "top"])
def test_an_extra_is_there_and_the_pinned_packages_fit_what_it_asks_for(wheel: Path, extra: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    assert extra in metadata.get_all("Provides-Extra", ())
    rows = [Requirement(row) for row in metadata.get_all("Requires-Dist", ())]
    asked = [row for row in rows if row.marker is not None and row.marker.evaluate({"extra": extra})]
    assert asked
    assert [str(row) for row in asked if version(row.name) not in row.specifier] == []
    assert {more for row in asked for more in row.extras} <= set(metadata.get_all("Provides-Extra", ()))
