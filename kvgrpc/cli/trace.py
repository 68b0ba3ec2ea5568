"""`kvgrpc trace`: the spans of a transfer at several servers, as one tree."""

import asyncio
import json
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvgrpc.cli.dialing import Timeout, TlsDir, TokenFile, checked_addresses, credentials
from kvgrpc.errors import KVGrpcError

if TYPE_CHECKING:
    from kvgrpc.client import Client
    from kvgrpc.v1.admin_pb2 import ListSpansResponse

_TRACE_ID = re.compile(r"[0-9a-fA-F]{32}")


def trace(
    transfer: Annotated[str, typer.Argument(help="Id of a transfer, or a trace id.")],
    addresses: Annotated[
        list[str], typer.Argument(help="Servers of both sides, host:port each.", callback=checked_addresses)
    ] = ["127.0.0.1:50051"],  # noqa: B006 - typer copies it
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    timeout_s: Timeout = 5.0,
    tls_dir: TlsDir = "",
    token_file: TokenFile = "",
) -> None:
    """Show the spans of a transfer's trace at all its servers as one tree, without a collector.

    Example: [bold]kvgrpc trace TRANSFER 10.0.0.1:50051 10.0.0.2:50051[/bold]

    Servers keep spans with the setting [bold]trace_ring_spans[/bold]. Offsets are from the first span, by the clocks of
    the servers' hosts. Exit code 1 when a server cannot be asked, or when no server has a span.
    """
    from kvgrpc.cli import trace_view

    found, unasked = asyncio.run(_found(transfer, addresses, timeout_s, credentials(tls_dir, token_file)))
    spans = trace_view.in_order(
        trace_view.PlacedSpan(address, reply.header.engine_id, span)
        for address, replies in found.items()
        for reply in replies
        for span in reply.spans
    )
    if as_json:
        typer.echo(json.dumps({"spans": [span.as_json() for span in spans], "unasked": unasked}))
    else:
        typer.echo("\n".join(trace_view.tree(spans)), nl=bool(spans))
    for address, why in unasked.items():
        typer.echo(f"kvgrpc trace: {address} could not be asked: {why}", err=True)
    for address, replies in found.items():
        if not replies[0].span_count_max:
            typer.echo(f"kvgrpc trace: {address} keeps no spans: set trace_ring_spans", err=True)
    if not spans:
        typer.echo(f"kvgrpc trace: no server that was asked has a span of {transfer}", err=True)
    raise typer.Exit(int(bool(unasked) or not spans))


async def _found(
    transfer: str, addresses: list[str], timeout_s: float, shown: Any
) -> tuple[dict[str, list["ListSpansResponse"]], dict[str, str]]:
    """Returns by address the replies of the servers, and why others could not be asked. Only one side knows the
    transfer's id, and then all are asked for its trace.
    """
    found: dict[str, list[ListSpansResponse]] = {}
    unasked: dict[str, str] = {}

    async def ask(address: str, transfer_id: str, trace_ids: set[str]) -> None:
        from kvgrpc import client

        async def asked(server: "Client") -> list["ListSpansResponse"]:
            replies = [await server.spans(transfer_id=transfer_id)] if transfer_id else []
            return replies + [await server.spans(trace_id=one) for one in sorted(trace_ids)]

        try:
            async with client.connect(address, timeout_s=timeout_s, credentials=shown) as server:
                found[address] = found.get(address, []) + await asked(server)
        except KVGrpcError as error:
            unasked[address] = str(error)

    own = {transfer.lower()} if _TRACE_ID.fullmatch(transfer) else set()
    await asyncio.gather(*(ask(address, transfer, own) for address in dict.fromkeys(addresses)))
    traces = {span.trace_id for replies in found.values() for reply in replies for span in reply.spans}
    if traces - own:
        await asyncio.gather(*(ask(address, "", traces - own) for address in list(found)))
    return {address: found[address] for address in addresses if address in found and address not in unasked}, unasked
