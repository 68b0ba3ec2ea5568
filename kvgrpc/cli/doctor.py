"""`kvgrpc doctor`: what is wrong here (`machine_findings`) or between servers (`peer_findings`), and what to do."""

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvgrpc.cli.dialing import Timeout, TlsDir, TokenFile, checked_addresses, credentials
from kvgrpc.cli.terminal import coloured, readable
from kvgrpc.errors import KVGrpcError

if TYPE_CHECKING:
    from kvgrpc.cli.machine_findings import Finding
    from kvgrpc.config import Config

_COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}


def doctor(  # noqa: PLR0913, PLR0917 - one argument per option, all by name
    addresses: Annotated[
        list[str] | None,
        typer.Argument(help="Servers to look at, too, and the way between them.", callback=checked_addresses),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of the server that is to run here.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also move a few blocks between the servers, and say how fast.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line instead of text.")] = False,
    timeout_s: Timeout = 5.0,
    tls_dir: TlsDir = "",
    token_file: TokenFile = "",
) -> None:  # fmt: skip
    """Look at this machine and, if some are named, at servers, and say what to do about what is wrong.

    Example: [bold]kvgrpc doctor 10.0.0.1:50051 10.0.0.2:50051 --measure[/bold]

    It changes nothing. With --measure it takes free blocks for a moment. Exit code 1 if something is in the way of
    moving KV, 2 for a configuration that is not usable.
    """
    from kvgrpc import config_sources

    try:
        settings = config_sources.load(config, os.environ | ({"KVGRPC_TLS_DIR": tls_dir} if tls_dir else {}), {})
    except KVGrpcError as error:
        typer.echo(f"kvgrpc doctor: {readable(error.sentence)}", err=True)
        raise typer.Exit(2) from error
    found = asyncio.run(
        _look(settings, addresses or [], timeout_s, tls_dir, token_file, measure=measure, as_json=as_json)
    )
    raise typer.Exit(1 if "error" in {one.grade.value for one in found} else 0)


async def _look(  # noqa: PLR0913 - the options of the command
    settings: "Config", addresses: list[str], timeout_s: float, tls_dir: str, token_file: str, *, measure: bool,
    as_json: bool,
) -> list["Finding"]:  # fmt: skip
    """Prints each finding when it is known, and returns all."""
    from kvgrpc.cli import machine_findings, peer_findings

    found = []
    for one in machine_findings.of_this_machine(settings, os.environ):
        found.append(one)
        _say(one, as_json=as_json)
    if addresses:
        shown = credentials(tls_dir, token_file)
        async for one in peer_findings.of_servers(addresses, timeout_s, shown, measured=measure):
            found.append(one)
            _say(one, as_json=as_json)
    return found


def _say(one: "Finding", *, as_json: bool) -> None:
    if as_json:
        row = {"grade": one.grade.value, "subject": one.subject, "says": one.says, "remedy": one.remedy}
        typer.echo(json.dumps(row))
        return
    grade = coloured(f"{one.grade.value:8}", _COLOURS[one.grade.value])
    typer.echo(f"{grade} {readable(f'{one.subject}: {one.says}')}")
    if one.remedy and one.grade.value != "ok":
        typer.echo(f"         {readable(one.remedy)}")
