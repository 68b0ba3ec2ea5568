"""The command `kvgrpc top`. The screen and its library are imported when the command runs."""

import sys
from typing import Annotated

import typer

from kvgrpc.cli.dialing import TlsDir, TokenFile, checked_addresses, credentials


def top(
    addresses: Annotated[
        list[str], typer.Argument(help="Servers, host:port each.", callback=checked_addresses, show_default=True)
    ] = ["127.0.0.1:50051"],  # noqa: B006 - typer copies it
    interval_s: Annotated[float, typer.Option("--interval-s", min=0.1, help="Time between two looks.")] = 2.0,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=0.001, help="Time after which a silent server is away.")
    ] = 5.0,
    tls_dir: TlsDir = "",
    token_file: TokenFile = "",
) -> None:
    """Watch servers on a screen: engines, pools, leases, transfers, peers and quarantine.

    Example: [bold]kvgrpc top 10.0.0.1:50051 10.0.0.2:50051[/bold]

    The keys are on the first and the last line of the screen. What ends something asks before.
    """
    from kvgrpc.cli.top.screen import TopApp

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        typer.echo("kvgrpc top: needs a terminal; kvgrpc get engines lists the same once", err=True)
        raise typer.Exit(2)
    TopApp(addresses, credentials(tls_dir, token_file), interval_s=interval_s, timeout_s=timeout_s).run()
