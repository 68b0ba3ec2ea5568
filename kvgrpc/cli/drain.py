"""`kvgrpc drain`: makes servers refuse new work, or take it again, and shows what is still in progress."""

import asyncio
import json
from typing import TYPE_CHECKING, Annotated

import typer

from kvgrpc.cli.dialing import Timeout, TlsDir, TokenFile, checked_addresses, credentials, tell
from kvgrpc.cli.terminal import readable
from kvgrpc.errors import KVGrpcError

if TYPE_CHECKING:
    from kvgrpc.client import Client
    from kvgrpc.v1.admin_pb2 import CancelDrainResponse, Drain, DrainBlocker, GetDrainResponse, StartDrainResponse

    Reply = CancelDrainResponse | GetDrainResponse | StartDrainResponse

WAIT_POLL_S = 0.5
"""Time between two looks of --wait, in seconds."""


def drain(  # noqa: PLR0913, PLR0917 - one argument per option, all by name
    addresses: Annotated[
        list[str],
        typer.Argument(metavar="ADDRESS...", help="host:port of kvgrpc servers.", callback=checked_addresses),
    ],
    cancel: Annotated[bool, typer.Option("--cancel", help="Take new work again.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the servers may be stopped.")] = False,
    reason: Annotated[str, typer.Option(help="Reason for the drain, which the servers show.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line instead of text.")] = False,
    timeout_s: Timeout = 5.0,
    tls_dir: TlsDir = "",
    token_file: TokenFile = "",
) -> None:
    """Let servers take no new work, and show what is still in progress: they may be stopped when nothing is.

    Example: [bold]kvgrpc drain 10.0.0.1:50051 --wait[/bold]

    New transfers, leases and blocks are refused with DRAINING; what has begun goes on to its end. Without --wait the
    answer comes at once. With it the command shows each change, and ends when nothing is in progress. Exit code 1 when
    a server cannot be reached, or takes new work again meanwhile.
    """
    from kvgrpc import client

    if cancel and (wait or reason):
        raise typer.BadParameter("--cancel goes with neither --wait nor --reason")
    shown = credentials(tls_dir, token_file)

    async def ordered(address: str) -> bool:
        try:
            async with client.connect(address, timeout_s=timeout_s, credentials=shown) as server:
                view = _View(address, as_json=as_json)
                if cancel:
                    view.show(await server.cancel_drain())
                    return True
                reply = await server.start_drain(reason)
                view.show(reply)
                return not wait or await _ended(server, reply.drain, view)
        except KVGrpcError as error:
            tell("drain", address, error)
            return False

    async def all_ordered() -> list[bool]:
        return await asyncio.gather(*map(ordered, addresses))

    if not all(asyncio.run(all_ordered())):
        raise typer.Exit(1)


async def _ended(server: "Client", state: "Drain", view: "_View") -> bool:
    """Waits until nothing is in progress, and shows what changes. Returns False if the server takes work again."""
    while state.transfer_count or state.lease_count or state.quarantined_block_count:
        await asyncio.sleep(WAIT_POLL_S)
        reply = await server.get_drain()
        state = reply.drain
        view.show(reply)
        if not state.HasField("age"):
            typer.echo(f"kvgrpc drain: {view.address}: the server takes new work again", err=True)
            return False
    return True


class _View:
    """The output about one server: each state once, and of its rows those that are new or changed."""

    def __init__(self, address: str, *, as_json: bool) -> None:
        self.address = address
        self._as_json = as_json
        self._last: tuple[str, frozenset[str]] = "", frozenset()

    def show(self, reply: "Reply") -> None:
        """Shows a reply if it differs from the last one, its times aside."""
        from kvgrpc.cli.listings import as_json

        state = reply.drain
        head = f"{reply.header.engine_id} at {self.address}: {_head(state)}"
        rows = {_row(blocker): _until(blocker) for blocker in state.blockers}
        last, self._last = self._last, (head, frozenset(rows))
        if last == self._last:
            return
        if self._as_json:
            named = {"address": self.address, "engine": reply.header.engine_id}
            typer.echo(json.dumps(named | as_json(state)))
            return
        typer.echo(readable(head))
        for row, until in rows.items():
            if row not in last[1]:
                typer.echo(f"  {readable(row)}{until}")
        if more := state.blocker_count - len(state.blockers):
            typer.echo(f"  and {more} more")


def _head(state: "Drain") -> str:
    from kvgrpc import client
    from kvgrpc.v1.handshake_pb2 import Admission

    reason = f" ({state.reason!r})" if state.reason else ""
    oldest = f" (the oldest is {state.oldest_transfer_id})" if state.oldest_transfer_id else ""
    return (
        f"admission {client.name_of(Admission, state.admission)}{reason}; in progress: "
        f"{state.transfer_count} transfers{oldest}, {state.lease_count} leases, {state.quarantined_block_count} blocks "
        "in quarantine"
    )


def _row(blocker: "DrainBlocker") -> str:
    """Returns what is in progress and whose it is. Names from outside are quoted."""
    from kvgrpc import client
    from kvgrpc.v1.transfer_pb2 import Direction, TransferState

    match blocker.WhichOneof("work"):
        case "transfer":
            made = blocker.transfer
            kind = f"{client.name_of(Direction, made.direction)}, {client.name_of(TransferState, made.state)}"
            peer = f", peer {made.peer.engine_id!r}" if made.HasField("peer") else ""
            return f"transfer {made.transfer_id} ({kind}) of {blocker.owner!r}, request {made.request_id!r}{peer}"
        case "lease":
            readers = f", read by {', '.join(map(repr, blocker.reader_engine_ids))}" * bool(blocker.reader_engine_ids)
            return f"lease {blocker.lease.lease_id} of {blocker.owner!r}, request {blocker.lease.request_id!r}{readers}"
    count = sum(sum(row.runs.counts) for row in blocker.pin.blocks.groups)
    return f"quarantine {blocker.pin.owner} of {blocker.owner!r}: {count} blocks, missing: {blocker.pin.missing_proof}"


def _until(blocker: "DrainBlocker") -> str:
    return f", ends in {blocker.remaining.ToTimedelta().total_seconds():.0f} s" * blocker.HasField("remaining")
