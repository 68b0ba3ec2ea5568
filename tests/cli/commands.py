"""Runs the commands of kvgrpc."""

import subprocess
import sys


def run(*arguments: str, given: str = "") -> tuple[int, list[str], str]:
    """Runs a command, which reads what is given. Returns its exit code, the lines of its output, and its errors."""
    command = [sys.executable, "-m", "kvgrpc", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, input=given)
    return done.returncode, done.stdout.splitlines(), done.stderr
