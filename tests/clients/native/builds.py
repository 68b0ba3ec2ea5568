"""Builds of what is written in C, C++ and Rust. They stay beside their sources, so a second run compiles nothing."""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BUILD_TIMEOUT_S = 600.0
"""Timeout for a build beside other tests, in seconds. On an idle machine it takes ten."""


def need(*programs: str) -> None:
    """Skips the test where a program is missing."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not on the PATH")


def run(*command: str, cwd: Path = ROOT, timeout_s: float = BUILD_TIMEOUT_S, **environment: str) -> str:
    """Runs a command and returns its output. Fails with it."""
    env, stdout = os.environ | environment, subprocess.PIPE
    done = subprocess.run(
        command, cwd=cwd, env=env, stdout=stdout, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def build(folder: str, *options: str, name: str = "build") -> Path:
    """Builds a CMake project of this clone, one process at a time, and returns its build folder."""
    need("cmake", "cc", "c++")
    source = ROOT / folder
    made = source / name
    made.mkdir(exist_ok=True)
    with (made / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run("cmake", "-S", str(source), "-B", str(made), *options)
        run("cmake", "--build", str(made), "--parallel", "2")
    return made
