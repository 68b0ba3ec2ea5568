"""The demo's command line: `python -m examples.demo`, in the root of a clone."""

import signal
import sys

import typer

from examples.demo.command import demo
from kvgrpc.cli.plain_flags import PlainCommand

app = typer.Typer(name="demo", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.command(cls=PlainCommand)(demo)


def main() -> None:
    """Runs the command and exits with its code. After SIGTERM, too, it first ends what it started."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    app()


if __name__ == "__main__":
    main()
