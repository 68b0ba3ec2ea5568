"""Options of the commands that call a server: TLS and a token. The variables are those of a server's `[tls]`."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvgrpc.client import Credentials

_PANEL = "Security"
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
