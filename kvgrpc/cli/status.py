"""`kvgrpc status`: the state of a server: pool map, leases, transfers, peers, and the owners of pins."""

import asyncio
import json
from typing import Annotated

import typer

from kvgrpc.cli.dialing import Address, Timeout, TlsDir, TokenFile, credentials, tell
from kvgrpc.errors import KVGrpcError


def status(
    address: Address = "127.0.0.1:50051",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    timeout_s: Timeout = 5.0,
    tls_dir: TlsDir = "",
    token_file: TokenFile = "",
) -> None:
    """Show one server: its pool as a map, leases, transfers, peers and pins.

    Example: [bold]kvgrpc status 10.0.0.1:50051[/bold]

    In the map a block is . free, a allocated, L leased, A read by a peer, T the target of a transfer, Q in quarantine.
    Exit code 1 when the server cannot be reached.
    """
    from kvgrpc.cli import status_view

    try:
        seen = asyncio.run(status_view.look(address, timeout_s, credentials(tls_dir, token_file)))
    except KVGrpcError as error:
        tell("status", address, error)
        raise typer.Exit(1) from error
    if as_json:
        typer.echo(json.dumps({name: status_view.as_json(value) for name, value in seen.items()}))
        return
    status_view.show(address, seen)
