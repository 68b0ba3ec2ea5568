"""What `kvgrpc status` shows, and how. Imported when the command runs: every start of a server would pay for it."""

from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from kvgrpc import client
from kvgrpc.errors import NotFound, Unavailable
from kvgrpc.v1 import admin_pb2, common_pb2, handshake_pb2, lease_pb2, pool_pb2, transfer_pb2

MAP_COLUMNS = 64
_CELLS = {
    admin_pb2.PIN_KIND_LEASE: "[cyan]L[/]",
    admin_pb2.PIN_KIND_ACCESS: "[blue]A[/]",
    admin_pb2.PIN_KIND_TARGET: "[yellow]T[/]",
    admin_pb2.PIN_KIND_QUARANTINE: "[red]Q[/]",
}
_STRONGER = list(_CELLS)
"""A block with several pins shows the last of these."""


async def look(address: str, timeout_s: float) -> dict[str, Any]:
    """Everything that is shown, asked once."""
    async with client.connect(address, timeout_s=timeout_s) as server:
        seen: dict[str, Any] = {"status": await server.status(), "capabilities": await server.capabilities()}
        for name, ask in (
            ("pool", server.pool_status),
            ("leases", server.list_leases),
            ("transfers", server.list_transfers),
            ("peers", server.peers),
            ("pins", server.pins),
        ):
            try:
                seen[name] = await ask()
            except (NotFound, Unavailable):  # no engine is attached: there is no pool to speak of
                seen[name] = None
        return seen


def as_json(value: Message | None) -> dict[str, Any] | None:
    """A message with all of its fields; None for what the server has not."""
    if value is None:
        return None
    return MessageToDict(value, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def show(address: str, seen: dict[str, Any]) -> None:
    """Tables on standard output, of what `look` has seen."""
    console = Console()
    state: admin_pb2.GetStatusResponse = seen["status"]
    admission = admin_pb2.Admission.Name(state.admission).removeprefix("ADMISSION_").lower()
    why = f" ({state.admission_reason})" if state.admission_reason else ""
    console.print(
        f"[bold]{state.header.engine_id}[/] at {address}, version {state.version}, up {_s(state.uptime)}, "
        f"admission [bold]{admission}[/]{why}",
        highlight=False,
    )
    paths = ", ".join(p.name if p.available else f"no {p.name} ({p.why})" for p in seen["capabilities"].data_paths)
    console.print(f"data paths: {paths or 'none yet'}", highlight=False)
    if seen["pool"] is not None:
        _show_pool(console, seen["pool"], seen["pins"])
    _show_leases(console, seen["leases"].leases if seen["leases"] else [])
    _show_transfers(console, seen["transfers"].transfers if seen["transfers"] else [])
    _show_peers(console, seen["peers"].peers if seen["peers"] else [])


def _show_pool(console: Console, pool: pool_pb2.GetPoolStatusResponse, pins: admin_pb2.ListPinsResponse) -> None:
    for index, group in enumerate(pool.groups):
        console.print(
            f"\npool group [bold]{group.name}[/]: {group.blocks} blocks, {group.free} free, {group.allocated} "
            f"allocated, {group.leased} leased, {group.targets} targets, {group.quarantined} quarantined",
            highlight=False,
        )
        console.print(_map(index, group.blocks, pins), highlight=False)


def _map(group: int, blocks: int, pins: admin_pb2.ListPinsResponse) -> str:
    """One character a block; a large pool is shown by its strongest pin per stretch of blocks."""
    per_cell = -(-blocks // (MAP_COLUMNS * 16))
    rank = [0] * -(-blocks // per_cell)
    for pin in pins.pins:
        strength = _STRONGER.index(pin.kind) + 1 if pin.kind in _CELLS else len(_CELLS)
        for rows in (row.blocks for row in pin.blocks if row.group == group):
            for block in _ids(rows):
                rank[block // per_cell] = max(rank[block // per_cell], strength)
    cells = ["." if not strength else _CELLS[_STRONGER[strength - 1]] for strength in rank]
    lines = ["".join(cells[i : i + MAP_COLUMNS]) for i in range(0, len(cells), MAP_COLUMNS)]
    return "\n".join(lines)


def _ids(runs: common_pb2.BlockRuns) -> list[int]:
    return [start + i for start, count in zip(runs.starts, runs.counts, strict=True) for i in range(count)]


def _show_leases(console: Console, leases: list[lease_pb2.Lease]) -> None:
    table = Table("lease", "request", "blocks", "left", "consumers", "reading", "renewed", box=None)
    for lease in leases:
        blocks = sum(sum(row.blocks.counts) for row in lease.blocks)
        done = f"{lease.consumers_done} of {lease.consumers}"
        table.add_row(
            lease.lease_id, lease.request_id, str(blocks), _s(lease.remaining), done, str(lease.open_accesses),
            str(lease.renewals),
        )  # fmt: skip
    _print(console, "leases", table)


def _show_transfers(console: Console, transfers: list[transfer_pb2.Transfer]) -> None:
    table = Table("transfer", "way", "state", "memory", "request", "peer", "bytes", "path", "age", "why", box=None)
    for row in transfers:
        table.add_row(
            row.transfer_id,
            transfer_pb2.Direction.Name(row.direction).removeprefix("DIRECTION_").lower(),
            transfer_pb2.TransferState.Name(row.state).removeprefix("TRANSFER_STATE_").lower(),
            transfer_pb2.MemoryDisposition.Name(row.memory).removeprefix("MEMORY_DISPOSITION_").lower(),
            row.request_id,
            row.peer.engine_id,
            f"{row.bytes_done:,}/{row.bytes:,}",
            row.paths[0].data_path if row.paths else "",
            _s(row.age),
            row.failure.message if row.HasField("failure") else row.waiting_for,
        )
    _print(console, "transfers", table)


def _show_peers(console: Console, peers: list[handshake_pb2.Peer]) -> None:
    table = Table("peer", "address", "state", "path", "why", "silence", "accesses", box=None)
    for peer in peers:
        path = peer.paths[0] if peer.paths else handshake_pb2.RankPath()
        table.add_row(
            peer.engine_id,
            peer.address,
            handshake_pb2.PeerState.Name(peer.state).removeprefix("PEER_STATE_").lower(),
            path.data_path,
            path.why,
            _s(peer.silence),
            str(peer.open_accesses),
        )
    _print(console, "peers", table)


def _print(console: Console, title: str, table: Table) -> None:
    console.print(f"\n[bold]{title}[/]: {table.row_count or 'none'}", highlight=False)
    if table.row_count:
        console.print(table)


def _s(value: Any) -> str:
    return f"{value.seconds + value.nanos / 1e9:.1f} s"
