"""The application object to which the commands are added."""

import platform
from importlib import metadata

import typer

from kvgrpc import __version__
from kvgrpc.cli.doctor import doctor
from kvgrpc.cli.drain import drain
from kvgrpc.cli.get import cancel, describe, get, release, why
from kvgrpc.cli.serve import serve
from kvgrpc.cli.status import status
from kvgrpc.cli.trace import trace

app = typer.Typer(
    name="kvgrpc",
    help="Moves KV-cache blocks between LLM engines, as a gRPC microservice.",
    epilog="Start with: kvgrpc serve, then in another terminal: kvgrpc status.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(serve)
app.command()(status)
app.command()(drain)
app.command()(doctor)
for command in (get, describe, why, trace, cancel, release):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(_versions())
        raise typer.Exit


def _versions() -> str:
    """Returns the version of kvgrpc in the first line, and of what it runs on below."""
    from kvgrpc.core.values.limits import PROTOCOL_MAX, PROTOCOL_MIN

    rows = [__version__, f"protocol {PROTOCOL_MIN} to {PROTOCOL_MAX}", f"Python {platform.python_version()}"]
    for name in ("grpcio", "protobuf", "numpy", "torch", "nixl-cu12"):
        try:
            rows.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            rows.append(f"{name} not installed")
    return "\n".join(rows)


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    pass
