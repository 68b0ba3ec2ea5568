"""The console script of the base package alone says which extra to install, instead of failing at an import."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
sys.modules[{missing!r}] = None  # as if it were not there
sys.argv = ["kvgrpc", "serve", "--port", "0"]
from kvgrpc.cli import main
main()
"""


@pytest.mark.parametrize("missing", ["typer", "numpy", "grpc_health"])
def test_the_command_line_names_the_extra_that_is_missing(missing: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(missing=missing)], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"kvgrpc: {missing} is not installed; the command line needs it: "
        "install kvgrpc with its extra 'server', as in the README\n"
    )


def test_top_names_its_own_extra() -> None:
    script = SCRIPT.format(missing="textual").replace('"serve", "--port", "0"', '"top"')
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "kvgrpc: textual is not installed; `kvgrpc top` needs it: "
        "install kvgrpc with its extra 'top', as in the README\n"
    )
