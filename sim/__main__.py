"""The simulator's command line: `python -m sim`."""

import signal
import sys

import typer

from sim.command import sim

app = typer.Typer(name="sim", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.command()(sim)


def main() -> None:
    """Runs the command and exits with its code. After SIGTERM, too, it first ends what it started."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    app()


if __name__ == "__main__":
    main()
