"""The command line: `kvgrpc serve | demo | status | drain | bench | sim`.

One file a command. `main` is the console script; it also works where only the base package is installed, to say what
is missing.
"""

import signal
import sys


def main() -> None:
    """Runs the command line; exits with its code. After SIGTERM, too, commands first end what they started."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        from kvgrpc.cli.app import app

        app()  # commands import what they need only when they run
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing in ("", "kvgrpc"):
            raise
        sys.stderr.write(
            f"kvgrpc: {missing} is not installed; the command line needs the server extra: "
            "pip install 'kvgrpc[server]'\n"
        )
        sys.exit(2)
