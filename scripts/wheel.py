"""Builds the package's wheel twice, from two copies of the tree, and compares the two (`make wheel`).

    python scripts/wheel.py                          the wheel is in dist/
    python scripts/wheel.py --out build/x            the wheel is in build/x/
    python scripts/wheel.py --path                   prints its path and nothing else
    python scripts/wheel.py --install                also installs it without extras, as a router does, and weighs that

A copy has the files that git tracks or would track, and nothing that a build left behind. The two copies differ in the
length of their paths, in times and in permissions, as two clones do.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEEL_MB_MAX = 2.0
"""Maximum size of the wheel, in MB: the wheel of the last release is kept in the repository."""
INSTALLED_MB_MAX = 40
"""Maximum size of what the base install adds to an environment, in MB."""
ALLOWED = frozenset({"grpcio", "kvgrpc", "opentelemetry-api", "protobuf", "typing_extensions"})
"""Packages of the base install."""
CLIENT = """
import sys
from kvgrpc.client import connect_sync
from kvgrpc.errors import Unavailable

with connect_sync("127.0.0.1:1") as client:
    try:
        client.capabilities(timeout_s=5.0)
    except Unavailable:
        print("a call was made")
"""


class Failed(Exception):
    """A check failed; the message says which."""


def main() -> int:
    """Builds, compares, and checks what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel")
    parser.add_argument("--install", action="store_true", help="install the wheel without extras, and weigh that")
    parser.add_argument("--path", action="store_true", help="print the path of the wheel and nothing else")
    options = parser.parse_args()
    try:
        wheel = build_twice(options.out)
        print(wheel if options.path else _described(wheel))
        if options.install:
            install(wheel)
    except Failed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def build_twice(out: Path) -> Path:
    """Returns the wheel, which two builds made alike. Raises Failed when they differ or the wheel is too large."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = (_build(Path(folder) / name, umask) for name, umask in (("a", 0o22), ("a-longer-name", 0o77)))
        if first.name != second.name or first.read_bytes() != second.read_bytes():
            raise Failed(f"two builds differ: {first.name} {second.name} {_differences(first, second)}")
        out.mkdir(parents=True, exist_ok=True)
        wheel = Path(shutil.copy(first, out / first.name))
    if (size_mb := wheel.stat().st_size / 1e6) > WHEEL_MB_MAX:
        raise Failed(f"{wheel.name} has {size_mb:.2f} MB; {WHEEL_MB_MAX:g} MB are allowed")
    return wheel


def install(wheel: Path) -> None:
    """Installs the wheel without extras into a new environment, makes a call with its client, and weighs what was
    added. Raises Failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python, empty_mb = str(Path(folder) / "bin" / "python"), _size_mb(Path(folder))
        before = _packages(python)
        _run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel))
        added, added_mb = _packages(python) - before, _size_mb(Path(folder)) - empty_mb
        said = _run(python, "-c", CLIENT)
    if said.strip() != "a call was made":
        raise Failed(f"the client of the base install made no call: {said}")
    if not added <= ALLOWED:
        raise Failed(f"the base install brings {', '.join(sorted(added - ALLOWED))}")
    if added_mb > INSTALLED_MB_MAX:
        raise Failed(f"the base install adds {added_mb} MB; {INSTALLED_MB_MAX} MB are allowed")
    print(f"without extras: {', '.join(sorted(added))}; {added_mb} MB beside the {empty_mb} MB of an empty environment")


def _described(wheel: Path) -> str:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return f"{wheel}: built alike twice, {wheel.stat().st_size / 1e6:.2f} MB, sha256 {digest}"


def _build(copy: Path, umask: int) -> Path:
    """Copies the tree and returns the wheel built from the copy."""
    before = os.umask(umask)
    try:
        listed = _run("git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():  # a file that git tracks may be deleted
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, copy / name)
        out = copy / "dist"
        _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out), folder=copy)
    finally:
        os.umask(before)
    (wheel,) = out.glob("*.whl")
    return wheel


def _differences(first: Path, second: Path) -> list[str]:
    """Returns the names of members that one wheel lacks or has otherwise."""
    one, other = _members(first), _members(second)
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _members(wheel: Path) -> dict[str, object]:
    with zipfile.ZipFile(wheel) as archive:
        return {row.filename: (row.CRC, row.date_time, row.external_attr) for row in archive.infolist()}


def _packages(python: str) -> set[str]:
    listed = _run(python, "-m", "pip", "list", "--disable-pip-version-check", "--format", "freeze")
    return {line.partition("==")[0].partition(" ")[0] for line in listed.splitlines()}


def _size_mb(folder: Path) -> int:
    """Returns what `du -sm` counts."""
    return int(_run("du", "-sm", str(folder)).split()[0])


def _run(*command: str, folder: Path = ROOT) -> str:
    """Returns what a command says. Raises Failed with all of it when the command fails."""
    clean = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    done = subprocess.run(command, cwd=folder, env=clean, check=False, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{' '.join(command)} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
