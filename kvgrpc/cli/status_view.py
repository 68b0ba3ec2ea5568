"""Output of `kvgrpc status`. Imported only when the command runs: otherwise each start of a server pays for it."""

from datetime import UTC, datetime
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvgrpc import client
from kvgrpc.cli import pool_map
from kvgrpc.cli.listings import readable
from kvgrpc.client import name_of
from kvgrpc.errors import NotFound, Unavailable, Unimplemented
from kvgrpc.v1 import admin_pb2, common_pb2, handshake_pb2, lease_pb2, pool_pb2, transfer_pb2

MAP_COLUMNS = 64
MAP_ROWS = 16
COLUMNS_MAX = 10_000
"""Width of the output, in columns: no id is cut, and no row is broken, whatever the terminal or pipe says."""
_STYLES = {"a": "green", "L": "cyan", "A": "blue", "T": "yellow", "Q": "red"}


async def look(address: str, timeout_s: float, credentials: client.Credentials) -> dict[str, Any]:
    """Asks the server once for everything that is shown."""
    async with client.connect(address, timeout_s=timeout_s, credentials=credentials) as server:
        seen: dict[str, Any] = {"status": await server.status(), "capabilities": await server.capabilities()}
        for name, ask in (
            ("engine", server.get_engine),
            ("description", server.describe_pools),
            ("pool", server.pool_status),
            ("leases", server.list_leases),
            ("transfers", server.list_transfers),
            ("peers", server.peers),
            ("pins", server.pins),
            ("allocations", server.allocations),
        ):
            try:
                seen[name] = await ask()
            except (
                NotFound,
                Unavailable,
                Unimplemented,
            ):  # no engine is attached, or the server is older than the call
                seen[name] = None
        return seen


def as_json(value: Message | None) -> dict[str, Any] | None:
    """Returns a message with all of its fields; None for what the server does not have."""
    if value is None:
        return None
    return MessageToDict(value, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def show(address: str, seen: dict[str, Any]) -> None:
    """Prints what `look` has seen, as tables on standard output."""
    console = Console(width=COLUMNS_MAX)
    state: admin_pb2.GetStatusResponse = seen["status"]
    admission = name_of(handshake_pb2.Admission, state.admission)
    why = f" ({_plain(state.admission_reason)})" if state.admission_reason else ""
    console.print(
        f"[bold]{_plain(state.header.engine_id)}[/] at {address}, version {_plain(state.version)}, "
        f"up {_s(state.uptime)}, admission [bold]{admission}[/]{why}",
        highlight=False,
    )
    paths = ", ".join(map(_path, seen["capabilities"].data_paths))
    console.print(f"data paths: {_plain(paths) or 'none yet'}", highlight=False)
    if state.HasField("publication"):
        entry = state.publication
        said = "published" if entry.published else f"not published ({entry.failure or 'no engine yet'})"
        console.print(f"registry {_plain(entry.registry)}: {_plain(said)}", highlight=False)
    _show_kept(console, state.kept)
    if seen["engine"] is not None:
        load = seen["engine"].status
        _show_load(console, load, _spaces(seen["description"], len(load.groups)))
    if seen["pool"] is not None:
        spaces = _spaces(seen["description"], len(seen["pool"].groups))
        _show_pool(console, seen, spaces)
    _show_waits(console, state)
    _show_leases(console, seen["leases"].leases if seen["leases"] else [])
    _show_transfers(console, seen["transfers"].transfers if seen["transfers"] else [])
    _show_peers(console, seen["peers"].peers if seen["peers"] else [])


def _show_kept(console: Console, kept: admin_pb2.Kept) -> None:
    """Prints what the server keeps beside its pools."""
    kinds = sorted(kept.bytes_by_kind.items(), key=lambda row: (-row[1], row[0]))
    console.print(
        f"kept: {kept.total_bytes:,} bytes; callers {kept.caller_bytes:,} of {kept.caller_bytes_max:,}, "
        f"peers {kept.peer_bytes:,} of {kept.caller_bytes_max:,}, "
        f"engine {kept.engine_bytes:,} of {kept.engine_bytes_max:,}"
        + "".join(f"; {kind.replace('_', ' ')} {nbytes:,}" for kind, nbytes in kinds),
        highlight=False,
    )
    if kept.largest_callers:
        rows = ", ".join(f"{row.caller} {row.kept_bytes:,}" for row in kept.largest_callers)
        console.print(f"most of it by: {_plain(rows)}", highlight=False)


def _path(row: handshake_pb2.DataPathStatus) -> str:
    name = name_of(common_pb2.DataPath, row.data_path)
    return name if row.available else f"no {name} ({row.why})"


def _spaces(description: pool_pb2.DescribePoolsResponse | None, count: int) -> list[list[int]]:
    """Returns the groups of each block space; each group alone if the pool no longer has `count` groups."""
    groups = description.pools[0].groups if description is not None else []
    names = [group.space for group in groups] if len(groups) == count else [""] * count
    spaces: dict[str | int, list[int]] = {}
    for index, name in enumerate(names):
        spaces.setdefault(name or index, []).append(index)
    return list(spaces.values())


def _show_load(console: Console, load: handshake_pb2.EngineStatus, spaces: list[list[int]]) -> None:
    """Prints the load by which a router chooses an engine."""
    soft = sum(load.groups[groups[0]].soft_block_count for groups in spaces)
    console.print(
        f"load: {load.transfer_count} transfers, {load.waiting_turn_count} of them wait for their turn, "
        f"{load.queued_bytes:,} bytes to move, {load.lease_count} leases, {soft} blocks may be taken back",
        highlight=False,
    )


def _show_pool(console: Console, seen: dict[str, Any], spaces: list[list[int]]) -> None:
    pool: pool_pb2.GetPoolStatusResponse = seen["pool"]
    pins = seen["pins"].pins if seen["pins"] else []
    allocations = seen["allocations"].allocations if seen["allocations"] else []
    for groups in spaces:
        names = _plain(", ".join(pool.groups[index].name for index in groups))
        title = f"groups [bold]{names}[/], which share" if len(groups) > 1 else f"group [bold]{names}[/]:"
        counts = pool.groups[groups[0]]
        console.print(
            f"\npool {title} {counts.block_count} blocks, {counts.free_block_count} free, "
            f"{counts.allocated_block_count} allocated, {counts.leased_block_count} leased, "
            f"{counts.target_block_count} targets, {counts.quarantined_block_count} quarantined",
            highlight=False,
        )
        drawn = pool_map.letters(groups, counts.block_count, pins, allocations, MAP_COLUMNS * MAP_ROWS)
        for begin in range(0, len(drawn), MAP_COLUMNS):
            console.print(_coloured(drawn[begin : begin + MAP_COLUMNS]), highlight=False)
    console.print(pool_map.LEGEND, highlight=False)


def _coloured(letters: str) -> Text:
    line = Text()
    for letter in letters:
        line.append(letter, _STYLES.get(letter))
    return line


def _show_waits(console: Console, state: admin_pb2.GetStatusResponse) -> None:
    """Prints the requests that lack blocks, and the readers that wait for blocks of their own."""
    lacking = Table("lacks blocks", "began", "blocks", "for", box=None)
    for request in state.lacking_requests:
        blocks = sum(row.block_count for row in request.group_block_counts)
        _add(lacking, request.request_id, _began(request.request_time_us), str(blocks), _s(request.age))
    _print(console, "requests that lack blocks", lacking)
    readers = Table("lease", "blocks", "reader", "request", "began", "for", box=None)
    for row in state.waiting_readers:
        _add(
            readers,
            row.lease_id,
            str(row.block_count),
            row.engine_id,
            row.request_id,
            _began(row.request_time_us),
            _s(row.age),
        )
    _print(console, "readers that wait for blocks of their own", readers)


def _began(time_us: int) -> str:
    return datetime.fromtimestamp(time_us / 1e6, UTC).strftime("%H:%M:%S.%f")[:-3] if time_us else ""


def _show_leases(console: Console, leases: list[lease_pb2.Lease]) -> None:
    table = Table("lease", "request", "blocks", "left", "consumers", "reading", "renewed", box=None)
    for lease in leases:
        blocks = sum(sum(row.runs.counts) for row in lease.blocks.groups)
        done = f"{lease.done_consumer_count} of {lease.consumer_count}"
        _add(
            table,
            lease.lease_id, lease.request_id, str(blocks), _s(lease.remaining), done, str(lease.open_access_count),
            str(lease.renewal_count),
        )  # fmt: skip
    _print(console, "leases", table)


def _show_transfers(console: Console, transfers: list[transfer_pb2.Transfer]) -> None:
    table = Table("transfer", "way", "state", "memory", "request", "peer", "bytes", "path", "age", "why", box=None)
    for row in transfers:
        _add(
            table,
            row.transfer_id,
            name_of(transfer_pb2.Direction, row.direction),
            name_of(transfer_pb2.TransferState, row.state),
            name_of(transfer_pb2.MemoryDisposition, row.memory),
            row.request_id,
            row.peer.engine_id,
            f"{row.moved_bytes:,}/{row.total_bytes:,}",
            name_of(common_pb2.DataPath, row.paths[0].data_path) if row.paths else "",
            _s(row.age),
            row.failure.message if row.HasField("failure") else name_of(transfer_pb2.WaitingFor, row.waiting_for),
        )
    _print(console, "transfers", table)


def _show_peers(console: Console, peers: list[handshake_pb2.Peer]) -> None:
    table = Table("peer", "address", "state", "path", "why", "silence", "accesses", box=None)
    for peer in peers:
        path = peer.paths[0] if peer.paths else handshake_pb2.RankPath()
        _add(
            table,
            peer.engine_id,
            peer.address,
            name_of(handshake_pb2.PeerState, peer.state),
            name_of(common_pb2.DataPath, path.data_path),
            path.why,
            _s(peer.silence),
            str(peer.open_access_count),
        )
    _print(console, "peers", table)


def _print(console: Console, title: str, table: Table) -> None:
    console.print(f"\n[bold]{title}[/]: {table.row_count or 'none'}", highlight=False)
    if table.row_count:
        console.print(table)


def _add(table: Table, *cells: str) -> None:
    """Adds a row of texts that anybody may have sent: none of them is markup, or a command to the terminal."""
    table.add_row(*(Text(readable(cell)) for cell in cells))


def _plain(text: str) -> str:
    """Returns the same for a text within markup."""
    return escape(readable(text))


def _s(value: Any) -> str:
    return f"{value.seconds + value.nanos / 1e9:.1f} s"
