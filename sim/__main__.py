"""The simulator's command line: `python -m sim`."""

import signal
import sys

import typer

from kvgrpc.cli.plain_flags import PlainCommand
from sim.command import sim

app = typer.Typer(name="sim", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.command(cls=PlainCommand)(sim)


def main() -> None:
    """Runs the command and exits with its code. After SIGTERM, too, it first ends what it started."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    app()


if __name__ == "__main__":
    main()
