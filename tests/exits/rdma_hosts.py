"""Environment of a host with RDMA adapters, whose libraries NIXL finds beside its own."""

import ctypes.util
import subprocess
from pathlib import Path

import pytest

PACKAGES = ("ibverbs-providers", "libibverbs1", "libnl-route-3-200", "libnl-3-200")
APT_S = 60.0


def environment(folder: Path) -> dict[str, str]:
    """Returns the environment of such a process. Packages are not installed, but unpacked into a test folder."""
    if ctypes.util.find_library("efa"):
        return {}
    if not _downloaded(folder):
        pytest.skip(f"this host has no RDMA libraries, and apt-get cannot download {', '.join(PACKAGES)}")
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, folder / "root"], check=True)
    folders = {str(library.parent) for library in (folder / "root").rglob("lib*.so.*")}
    return {"LD_LIBRARY_PATH": ":".join(sorted(folders))}


def _downloaded(folder: Path) -> bool:
    """Downloads the packages, with the host's package lists or, if it has none, with lists in the folder."""
    (folder / "lists").mkdir()
    own = [f"-oDir::State::lists={folder}/lists", f"-oDir::Cache={folder}", "-oDebug::NoLocking=1"]
    return _apt(folder, "download", *PACKAGES) or (
        _apt(folder, *own, "update") and _apt(folder, *own, "download", *PACKAGES)
    )


def _apt(folder: Path, *arguments: str) -> bool:
    command = ["apt-get", "-qq", "-oAcquire::Retries=0", *arguments]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=APT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
