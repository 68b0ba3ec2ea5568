"""The wheel is the same whenever and wherever it is built, and holds the package alone."""

import subprocess
import sys
import zipfile
from pathlib import Path

import kvgrpc

ROOT = Path(__file__).parent.parent


def test_two_builds_of_the_wheel_are_alike_and_hold_the_package_alone(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "wheel.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name.partition("/")[0] for name in archive.namelist()}
    assert names == {"kvgrpc", f"kvgrpc-{kvgrpc.__version__}.dist-info"}
