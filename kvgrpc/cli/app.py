"""The application object to which the commands are added."""

import inspect
import os
import platform
from collections.abc import Callable
from importlib import metadata

import typer
from typer._completion_classes import completion_init

from kvgrpc import __version__
from kvgrpc.cli.completion import COMPLETE, completion
from kvgrpc.cli.doctor import doctor
from kvgrpc.cli.drain import drain
from kvgrpc.cli.fleet import fleet
from kvgrpc.cli.get import cancel, describe, get, release, release_quarantine, why
from kvgrpc.cli.plain_flags import PlainCommand, PlainGroup
from kvgrpc.cli.serve import serve
from kvgrpc.cli.status import status
from kvgrpc.cli.top.command import top
from kvgrpc.cli.trace import trace

app = typer.Typer(
    name="kvgrpc",
    cls=PlainGroup,
    help="Moves KV-cache blocks between LLM engines, as a gRPC microservice.",
    epilog="Start with: kvgrpc serve, then in another terminal: kvgrpc status.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
if COMPLETE in os.environ:
    completion_init()  # a shell asks what may come next


def _add(command: Callable[..., None]) -> None:
    """Adds a command. Its docstring is a summary, an example, and the rest; its help begins with the example, and is as
    wide as the terminal.
    """
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    summary, example, *rest = (paragraph.replace("\n", " ") for paragraph in paragraphs)
    app.command(cls=PlainCommand, help="\n\n".join([example, summary, *rest]), short_help=summary)(command)


for _command in (
    serve, fleet, status, top, drain, doctor, get, describe, why, trace, cancel, release, release_quarantine,
    completion,
):  # fmt: skip
    _add(_command)


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
