"""`kvgrpc drain`: makes a server refuse new work, or take it again."""

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from kvgrpc.cli.dialing import Address, Timeout, TlsDir, TokenFile, credentials
from kvgrpc.errors import KVGrpcError

if TYPE_CHECKING:
    from kvgrpc.v1.admin_pb2 import DrainResponse


def drain(
    address: Address,
    cancel: Annotated[bool, typer.Option("--cancel", help="Take new work again.")] = False,
    timeout_s: Timeout = 5.0,
    tls_dir: TlsDir = "",
    token_file: TokenFile = "",
) -> None:
    """Let a server take no new work, and show what is still going on: it may be stopped when nothing is.

    Example: [bold]kvgrpc drain 10.0.0.1:50051[/bold]

    New transfers, leases and blocks are refused with DRAINING; what has begun goes on to its end. The answer comes at
    once: repeat the command to look again. Exit code 1 when the server cannot be reached.
    """
    from kvgrpc import client
    from kvgrpc.v1.handshake_pb2 import Admission

    shown = credentials(tls_dir, token_file)

    async def told() -> "DrainResponse":
        async with client.connect(address, timeout_s=timeout_s, credentials=shown) as server:
            return await server.drain(cancel=cancel)

    try:
        left = asyncio.run(told())
    except KVGrpcError as error:
        typer.echo(f"kvgrpc drain: {error}", err=True)
        raise typer.Exit(1) from error
    oldest = f" (the oldest is {left.oldest_transfer_id})" if left.oldest_transfer_id else ""
    typer.echo(
        f"{left.header.engine_id} at {address}: admission {client.name_of(Admission, left.admission)}; going on: "
        f"{left.transfer_count} transfers{oldest}, {left.lease_count} leases, {left.quarantined_block_count} blocks in "
        "quarantine"
    )
