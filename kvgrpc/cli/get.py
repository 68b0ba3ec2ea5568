"""`kvgrpc get`, `describe`, `why`, `cancel`, `release` and `release-quarantine`: what servers have, who holds a block,
and how to end it.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from kvgrpc.cli.dialing import Address, Timeout, TlsDir, TokenFile, checked_addresses, credentials, tell
from kvgrpc.errors import KVGrpcError

if TYPE_CHECKING:
    from kvgrpc.client import Client

_T = TypeVar("_T")
AGAIN_S = 1.0
"""Interval between two looks with --watch, in seconds."""


class Kind(Enum):
    """The kinds of things that servers have."""

    ENGINES = "engines"
    LEASES = "leases"
    TRANSFERS = "transfers"
    PEERS = "peers"
    PINS = "pins"
    ALLOCATIONS = "allocations"
    BLOCKS = "blocks"
    TENSORS = "tensors"
    AUDIT = "audit"
    FLEET = "fleet"


class Output(Enum):
    """The forms of the output."""

    TABLE = "table"
    JSON = "json"
    NAME = "name"


class Form(Enum):
    """The forms of the output about one thing."""

    TABLE = "table"
    JSON = "json"


class Single(Enum):
    """The kinds of things that can be described alone."""

    ENGINE = "engine"
    TRANSFER = "transfer"
    LEASE = "lease"
    PEER = "peer"
    PIN = "pin"
    ALLOCATION = "allocation"
    TENSOR = "tensor"


FormOption = Annotated[Form, typer.Option("-o", "--output", help="Form of the output.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]
Addresses = Annotated[
    list[str], typer.Argument(help="Servers, host:port each.", callback=checked_addresses, show_default=True)
]


def get(  # noqa: PLR0913, PLR0917 - one argument per option, all by name
    kind: Annotated[Kind, typer.Argument(help="What to list.")],
    addresses: Addresses = ["127.0.0.1:50051"],  # noqa: B006 - typer copies it
    output: Annotated[Output, typer.Option("-o", "--output", help="Form of the output.")] = Output.TABLE,
    as_json: Annotated[bool, typer.Option("--json", help="The same as -o json: one JSON object a line.")] = False,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Go on, and show what is new or changed.")] = False,
    timeout_s: Timeout = 5.0,
    tls_dir: TlsDir = "",
    token_file: TokenFile = "",
) -> None:
    """List what servers have, one row each. Ids are never cut.

    Example: [bold]kvgrpc get leases 10.0.0.1:50051 10.0.0.2:50051[/bold]

    Exit code 1 when a server cannot be reached; the others are listed.
    """
    from kvgrpc.cli import listings

    output = Output.JSON if as_json else output
    shown, unreached = credentials(tls_dir, token_file), False
    known, told = set[str](), dict[str, str]()
    head = True
    while True:
        rows = []
        for address in addresses:
            try:
                rows += _ask(address, timeout_s, shown, lambda server: listings.rows_of(server, kind.value))
            except KVGrpcError as error:
                unreached = True
                if told.get(address) != str(error):
                    tell("get", address, error)
                told[address] = str(error)
            else:
                told.pop(address, None)
        answered = len(told) < len(addresses)
        _print(kind, output, [row for row in rows if row.key not in known], head=head and answered)
        if not watch:
            raise typer.Exit(int(unreached))
        known, head = {row.key for row in rows}, head and not answered
        time.sleep(AGAIN_S)


def _print(kind: Kind, output: Output, rows: list[Any], *, head: bool) -> None:
    from kvgrpc.cli import listings

    if output is Output.TABLE:
        typer.echo("\n".join(listings.table(kind.value, rows, head=head)), nl=bool(rows or head))
    for row in rows if output is not Output.TABLE else ():
        typer.echo(row.name if output is Output.NAME else json.dumps(row.message))


def describe(  # noqa: PLR0913, PLR0917 - one argument per option, all by name
    kind: Annotated[Single, typer.Argument(help="What to describe.")],
    name: Annotated[str, typer.Argument(help="Its id, as get lists it.")],
    address: Address = "127.0.0.1:50051",
    output: FormOption = Form.TABLE,
    timeout_s: Timeout = 5.0,
    tls_dir: TlsDir = "",
    token_file: TokenFile = "",
) -> None:
    """Show all that a server knows of one thing: of a peer the data paths, of the engine itself also its limits.

    Example: [bold]kvgrpc describe lease ID 10.0.0.1:50051[/bold]
    """
    from kvgrpc.cli import listings

    found = _one(
        address, timeout_s, tls_dir, token_file, lambda server: listings.named(server, kind.value, name), "describe"
    )
    for message in found:
        lines = listings.described(message) if output is Form.TABLE else [json.dumps(listings.as_json(message))]
        typer.echo("\n".join(lines))


def why(  # noqa: PLR0913, PLR0917 - one argument per option, all by name
    block: Annotated[int, typer.Argument(min=0, help="Id of the block.")],
    address: Address = "127.0.0.1:50051",
    group: Annotated[int, typer.Option(min=0, help="Index of the block's group.")] = 0,
    output: FormOption = Form.TABLE,
    timeout_s: Timeout = 5.0,
    tls_dir: TlsDir = "",
    token_file: TokenFile = "",
) -> None:
    """Say who holds a block, for which request, and since when.

    Example: [bold]kvgrpc why 17 10.0.0.1:50051 --group 1[/bold]
    """
    from kvgrpc.cli import listings

    found = _one(address, timeout_s, tls_dir, token_file, lambda server: server.pins(group=group, block=block), "why")
    lines = listings.holders(found, group, block) if output is Form.TABLE else [json.dumps(listings.as_json(found))]
    typer.echo("\n".join(lines))


def cancel(
    transfer: Annotated[str, typer.Argument(help="Id of the transfer.")],
    address: Address = "127.0.0.1:50051",
    as_json: Json = False,
    timeout_s: Timeout = 5.0,
    tls_dir: TlsDir = "",
    token_file: TokenFile = "",
) -> None:
    """Cancel a transfer. The other side hears of it.

    Example: [bold]kvgrpc cancel ID 10.0.0.1:50051[/bold]
    """
    from kvgrpc.client import name_of
    from kvgrpc.v1.transfer_pb2 import TransferState

    reply = _one(
        address, timeout_s, tls_dir, token_file,
        lambda server: server.cancel(transfer, message="kvgrpc cancel"), "cancel",
    )  # fmt: skip
    rows = (f"{row.transfer_id} is {name_of(TransferState, row.state)}" for row in reply.transfers)
    _say(reply, "\n".join(rows), as_json=as_json)


def release(
    lease: Annotated[str, typer.Argument(help="Id of the lease.")],
    address: Address = "127.0.0.1:50051",
    as_json: Json = False,
    timeout_s: Timeout = 5.0,
    tls_dir: TlsDir = "",
    token_file: TokenFile = "",
) -> None:
    """Release a lease. Its readers compute, and its blocks come free.

    Example: [bold]kvgrpc release ID 10.0.0.1:50051[/bold]
    """
    reply = _one(address, timeout_s, tls_dir, token_file, lambda server: server.release_lease(lease), "release")
    freed = sum(sum(row.runs.counts) for row in reply.freed_blocks.groups)
    _say(reply, f"{lease} is released; {freed} blocks have no pin any more", as_json=as_json)


def release_quarantine(  # noqa: PLR0913, PLR0917 - one argument per option, all by name
    address: Address,
    force: Annotated[bool, typer.Option("--force", help="Without proof: you know that nothing writes them.")] = False,
    message: Annotated[str, typer.Option(help="With --force: how you know it, for the server's log.")] = "",
    transfer: Annotated[list[str] | None, typer.Option(help="With --force: only the blocks of this transfer.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="With --force: do not ask.")] = False,
    as_json: Json = False,
    timeout_s: Timeout = 60.0,
    tls_dir: TlsDir = "",
    token_file: TokenFile = "",
) -> None:
    """Get blocks out of quarantine: the server registers its memory anew, which proves them at rest.

    Example: [bold]kvgrpc release-quarantine 10.0.0.1:50051[/bold]

    Meanwhile the server takes no new work, and transfers that read or write fail. With --force nothing is proved, and
    it asks before: bytes that still arrive would land in another request's blocks. Exit code 1 when blocks are left.
    """
    if force != bool(message):
        raise typer.BadParameter("--force and --message go together")
    if (transfer or yes) and not force:
        raise typer.BadParameter("--transfer and --yes go with --force")

    async def ask(server: "Client", *, validate_only: bool = False) -> Any:
        return await server.release_quarantine(
            force=force, message=message, transfer_ids=transfer or (), validate_only=validate_only, timeout_s=timeout_s
        )

    def call(asked: Callable[["Client"], Awaitable[Any]]) -> Any:
        return _one(address, timeout_s, tls_dir, token_file, asked, "release-quarantine")

    reply = call(lambda server: ask(server, validate_only=True)) if force and not yes else None
    if reply is not None and (count := reply.released_block_count):
        sure = f"Does nothing write the {count} blocks any more, so that requests may use them?"
        typer.confirm(sure, abort=True, err=True)
        reply = None
    if reply is None:  # blocks that came after a look at none were not asked about
        reply = call(ask)
    said = f"{reply.released_block_count} blocks are released; {reply.left_block_count} are still in quarantine"
    _say(reply, said, as_json=as_json)
    if reply.left_block_count:
        typer.echo(f"kvgrpc get pins {address} names the proofs that are missing.", err=True)
        raise typer.Exit(1)


def _say(reply: Any, text: str, *, as_json: bool) -> None:
    from kvgrpc.cli import listings

    typer.echo(json.dumps(listings.as_json(reply)) if as_json else text)


def _one(
    address: str,
    timeout_s: float,
    tls_dir: str,
    token_file: str,
    ask: Callable[["Client"], Awaitable[_T]],
    name: str,
) -> _T:
    """Returns what one server answers. An error ends the command with 1."""
    try:
        return _ask(address, timeout_s, credentials(tls_dir, token_file), ask)
    except KVGrpcError as error:
        tell(name, address, error)
        raise typer.Exit(1) from error


def _ask(address: str, timeout_s: float, shown: Any, ask: Callable[["Client"], Awaitable[_T]]) -> _T:
    from kvgrpc import client

    async def asked() -> _T:
        async with client.connect(address, timeout_s=timeout_s, credentials=shown) as server:
            return await ask(server)

    work: Coroutine[Any, Any, _T] = asked()
    return asyncio.run(work)
