"""The command line: `kvgrpc serve | status | drain`.

Each command has one file. `main` is the console script. It also runs with the base package alone, to say what is
missing.
"""

import signal
import sys


def main() -> None:
    """Runs the command line and exits with its code. After SIGTERM, too, a command first ends what it started."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        from kvgrpc.cli.app import app

        app()  # each command imports its own needs when it runs
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing in ("", "kvgrpc"):
            raise
        needs, extra = ("`kvgrpc top`", "top") if missing == "textual" else ("the command line", "server")
        sys.stderr.write(
            f"kvgrpc: {missing} is not installed; {needs} needs it: "
            f"install kvgrpc with its extra '{extra}', as in the README\n"
        )
        sys.exit(2)
