"""Options of the commands that call a server, and their words for a call that failed. The variables for TLS and a token
are those of a server's `[tls]`.
"""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from kvgrpc.cli.terminal import readable
from kvgrpc.errors import DeadlineExceeded, KVGrpcError, Unavailable, Unimplemented

if TYPE_CHECKING:
    from kvgrpc.client import Credentials

_PANEL = "Security"
NO_HTTP2 = "Failed parsing HTTP/2"
"""Part of gRPC's text about an answer that is no HTTP/2."""
Timeout = Annotated[float, typer.Option("--timeout-s", min=0.001, help="How long to wait for the server.")]


def checked_address(address: str) -> str:
    """Returns the address. Raises BadParameter for text that is neither host:port nor a target of gRPC's."""
    from kvgrpc.client.channel import check_target

    try:
        check_target(address)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return address


def checked_addresses(addresses: list[str] | None) -> list[str]:
    """Returns the addresses. Raises BadParameter as `checked_address` does."""
    return [checked_address(address) for address in addresses or ()]


Address = Annotated[str, typer.Argument(help="host:port of a kvgrpc server.", callback=checked_address)]
TlsDir = Annotated[
    str,
    typer.Option(
        "--tls-dir", envvar="KVGRPC_TLS_DIR", rich_help_panel=_PANEL,
        help="Folder with tls.crt, tls.key and ca.crt. KVGRPC_TLS_CERT, _KEY and _CA name single files.",
    ),
]  # fmt: skip
TokenFile = Annotated[
    str, typer.Option("--token-file", help="File with a bearer token for the server.", rich_help_panel=_PANEL)
]


def credentials(tls_dir: str, token_file: str) -> "Credentials":
    """Returns what a command shows to the server."""
    from kvgrpc.client import Credentials

    return Credentials.from_environment({**os.environ, "KVGRPC_TLS_DIR": tls_dir}, token_file)


def tell(command: str, address: str, error: KVGrpcError) -> None:
    """Writes to standard error which server failed a call and why, and what to do about one that is not reached."""
    from kvgrpc.client.channel import is_host_port

    said = str(error)
    where = "" if address in said else f"{address}: "
    typer.echo(f"kvgrpc {command}: {where}{readable(said)}", err=True)
    if NO_HTTP2 in said:
        typer.echo("Something answers there that is no gRPC server.", err=True)
    elif isinstance(error, Unavailable | DeadlineExceeded) and "tls" not in error.metadata and is_host_port(address):
        typer.echo(f"Is a server running there? Start one with: kvgrpc serve --listen {address}", err=True)
    if isinstance(error, Unimplemented):
        typer.echo("If the server has an address for operators (admin_listen), ask there.", err=True)
