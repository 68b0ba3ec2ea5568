"""Options of the commands that call a server: TLS and a token. The variables are those of a server's `[tls]`."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvgrpc.client import Credentials

_PANEL = "Security"
Timeout = Annotated[float, typer.Option("--timeout-s", min=0.001, help="How long to wait for the server.")]


def checked_address(address: str) -> str:
    """Returns the address. Raises BadParameter for text that is not host:port."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise typer.BadParameter(f"{address!r} is not host:port, such as 127.0.0.1:50051")
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
