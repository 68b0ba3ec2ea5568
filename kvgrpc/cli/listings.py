"""Rows of `kvgrpc get`, and the texts of `describe` and `why`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from kvgrpc.cli.terminal import readable
from kvgrpc.client import Client, name_of
from kvgrpc.errors import InvalidRequest, Reason
from kvgrpc.v1 import admin_pb2, common_pb2, fleet_pb2, handshake_pb2, pool_pb2, tensor_pb2, transfer_pb2


@dataclass(frozen=True)
class Row:
    """One thing that a server has: its name, its cells and its message. `key` differs where something but ages does."""

    name: str
    cells: tuple[str, ...]
    key: str
    message: dict[str, Any]


@dataclass(frozen=True)
class Listing:
    """One kind: how to ask for it, its columns, and a row's name and cells. Ages are in the last column."""

    ask: Callable[[Client], Any]
    columns: tuple[str, ...]
    name: Callable[[Any], str]
    cells: Callable[[Any], tuple[str, ...]]


@dataclass(frozen=True)
class HeldRun:
    """Blocks of one group that follow each other, with one of their holders: an allocation, or the owner of a pin."""

    group: int
    first_block: int
    block_count: int
    kind: str
    holder: str
    request_id: str
    age: str


def _s(value: Any) -> str:
    return f"{value.seconds + value.nanos / 1e9:.1f}s"


def _count(blocks: common_pb2.Blocks) -> str:
    return str(sum(sum(row.runs.counts) for row in blocks.groups))


async def _engines(server: Client) -> list[Message]:
    return [await server.status()]


async def _leases(server: Client) -> Sequence[Message]:
    return (await server.list_leases()).leases


async def _transfers(server: Client) -> Sequence[Message]:
    return (await server.list_transfers()).transfers


async def _peers(server: Client) -> Sequence[Message]:
    return (await server.peers()).peers


async def _pins(server: Client) -> Sequence[Message]:
    return (await server.pins()).pins


async def _allocations(server: Client) -> Sequence[Message]:
    return (await server.allocations()).allocations


async def _blocks(server: Client) -> Sequence[HeldRun]:
    return held_runs((await server.allocations()).allocations, (await server.pins()).pins)


def held_runs(allocations: Sequence[pool_pb2.Allocation], pins: Sequence[admin_pb2.Pin]) -> list[HeldRun]:
    """Returns the runs in the order of the blocks. A block has one for each of its holders."""
    held: list[tuple[pool_pb2.Allocation | admin_pb2.Pin, str, str]]
    held = [(row, "allocation", row.allocation_id) for row in allocations]
    held += [(row, name_of(admin_pb2.PinKind, row.kind), row.owner) for row in pins]
    runs = (
        HeldRun(ids.group, first, count, kind, holder, row.request_id, _s(row.age))
        for row, kind, holder in held
        for ids in row.blocks.groups
        for first, count in zip(ids.runs.starts, ids.runs.counts, strict=False)
    )
    return sorted(runs, key=lambda run: (run.group, run.first_block, run.kind, run.holder))


async def _tensors(server: Client) -> Sequence[Message]:
    return (await server.tensors().list()).tensors


async def _audit(server: Client) -> Sequence[Message]:
    return (await server.audit_records()).records


async def _fleet(server: Client) -> Sequence[Message]:
    return sorted((await server.fleet().engines()).engines, key=lambda row: (row.engine_id, row.incarnation))


def _fleet_engine(row: fleet_pb2.FleetEngine) -> tuple[str, ...]:
    return (
        name_of(fleet_pb2.EngineState, row.state), name_of(fleet_pb2.EngineRole, row.role), row.model_name,
        ",".join(row.addresses), row.host, f"{row.load:.2f}", row.why,
        _s(row.answer_age) if row.HasField("answer_age") else "never",
    )  # fmt: skip


def _engine(row: admin_pb2.GetStatusResponse) -> tuple[str, ...]:
    counts = row.counts
    return (
        name_of(handshake_pb2.Admission, row.admission), row.version,
        str(counts.pending_transfer_count + counts.active_transfer_count), str(counts.failed_transfer_count),
        str(counts.lease_count), str(counts.pinned_block_count), str(counts.quarantined_block_count), _s(row.uptime),
    )  # fmt: skip


def _lease(row: Any) -> tuple[str, ...]:
    done = f"{row.done_consumer_count}/{row.consumer_count}"
    return (row.request_id, _count(row.blocks), done, str(row.open_access_count), _s(row.remaining), _s(row.age))


def _transfer(row: transfer_pb2.Transfer) -> tuple[str, ...]:
    failed = row.HasField("failure")
    return (
        name_of(transfer_pb2.Direction, row.direction), name_of(transfer_pb2.TransferState, row.state), row.request_id,
        row.peer.engine_id, f"{row.moved_bytes}/{row.total_bytes}",
        name_of(common_pb2.DataPath, row.paths[0].data_path) if row.paths else "",
        name_of(common_pb2.FailureReason, row.failure.reason) if failed
        else name_of(transfer_pb2.WaitingFor, row.waiting_for),
        _s(row.age),
    )  # fmt: skip


def _peer(row: handshake_pb2.Peer) -> tuple[str, ...]:
    path = name_of(common_pb2.DataPath, row.paths[0].data_path) if row.paths else ""
    state = name_of(handshake_pb2.PeerState, row.state)
    return (row.address, state, path, str(row.open_access_count), _s(row.silence))


def _pin(row: admin_pb2.Pin) -> tuple[str, ...]:
    kind = name_of(admin_pb2.PinKind, row.kind)
    return (kind, row.request_id, row.peer_engine_id, _count(row.blocks), row.missing_proof, _s(row.age))


def _tensor(row: tensor_pb2.Tensor) -> tuple[str, ...]:
    done = f"{row.done_consumer_count}/{row.consumer_count}"
    state = name_of(tensor_pb2.TensorState, row.state)
    return (row.pair_id, state, str(row.page_count), done, row.peer_address, _s(row.age))


WITHOUT_ENGINE = frozenset({"engines", "fleet"})
"""Kinds whose rows are engines themselves: no column says at which engine a row was found."""
LISTINGS = {
    "engines": Listing(
        _engines, ("ENGINE", "ADMISSION", "VERSION", "TRANSFERS", "FAILED", "LEASES", "PINNED", "QUARANTINED", "UP"),
        lambda row: str(row.header.engine_id), _engine,
    ),
    "fleet": Listing(
        _fleet, ("ENGINE", "STATE", "ROLE", "MODEL", "ADDRESSES", "HOST", "LOAD", "WHY", "ANSWERED"),
        lambda row: str(row.engine_id), _fleet_engine,
    ),
    "leases": Listing(
        _leases, ("LEASE", "REQUEST", "BLOCKS", "DONE", "READING", "LEFT", "AGE"),
        lambda row: str(row.lease_id), _lease,
    ),
    "transfers": Listing(
        _transfers, ("TRANSFER", "WAY", "STATE", "REQUEST", "PEER", "BYTES", "PATH", "WHY", "AGE"),
        lambda row: str(row.transfer_id), _transfer,
    ),
    "peers": Listing(
        _peers, ("PEER", "ADDRESS", "STATE", "PATH", "ACCESSES", "SILENCE"), lambda row: str(row.engine_id), _peer,
    ),
    "pins": Listing(
        _pins, ("OWNER", "KIND", "REQUEST", "PEER", "BLOCKS", "MISSING PROOF", "AGE"),
        lambda row: str(row.owner), _pin,
    ),
    "allocations": Listing(
        _allocations, ("ALLOCATION", "REQUEST", "LABEL", "OWNER", "BLOCKS", "AGE"), lambda row: str(row.allocation_id),
        lambda row: (row.request_id, row.label, row.owner, _count(row.blocks), _s(row.age)),
    ),
    "blocks": Listing(
        _blocks, ("FIRST", "GROUP", "COUNT", "KIND", "HOLDER", "REQUEST", "AGE"), lambda row: str(row.first_block),
        lambda row: (str(row.group), str(row.block_count), row.kind, row.holder, row.request_id, row.age),
    ),
    "tensors": Listing(
        _tensors, ("TENSOR", "PAIR", "STATE", "PAGES", "DONE", "FROM", "AGE"),
        lambda row: f"{row.name}/{row.part}", _tensor,
    ),
    "audit": Listing(
        _audit, ("NUMBER", "CALLER", "METHOD", "TARGET", "OUTCOME", "MESSAGE", "AGE"), lambda row: str(row.number),
        lambda row: (row.caller, row.method, row.target, row.outcome, row.message, _s(row.age)),
    ),
}  # fmt: skip
"""Listings by the names of their kinds."""


async def rows_of(server: Client, kind: str) -> list[Row]:
    """Returns the rows of a server. Raises KVGrpcError."""
    listing = LISTINGS[kind]
    engine = readable((await server.capabilities()).header.engine_id) if kind not in WITHOUT_ENGINE else ""
    rows = []
    for message in await listing.ask(server):
        name, cells = readable(listing.name(message)), tuple(map(readable, listing.cells(message)))
        cells = (name, *cells) if kind in WITHOUT_ENGINE else (name, engine, *cells)
        rows.append(Row(name, cells, f"{kind} {cells[:-1]}", as_json(message) | ({"engine": engine} if engine else {})))
    return rows


def as_json(message: Message | HeldRun) -> dict[str, Any]:
    """Returns a message with the schema's names and all of its fields."""
    if isinstance(message, HeldRun):
        return asdict(message)
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def table(kind: str, rows: list[Row], *, head: bool) -> list[str]:
    """Returns rows as lines of text, as wide as they are. Several engines are told apart by their column."""
    first, *others = LISTINGS[kind].columns
    columns = [first, *others] if kind in WITHOUT_ENGINE else [first, "ENGINE", *others]
    lines = [*([tuple(columns)] if head else []), *(row.cells for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))] if lines else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def described(message: Message) -> list[str]:
    """Returns a message as indented lines, without fields that are not set. Data paths come first."""
    if isinstance(message, handshake_pb2.Peer):
        return ways(message)
    if isinstance(message, transfer_pb2.Transfer):
        return transfer_described(message)
    return list(_lines(MessageToDict(message, preserving_proto_field_name=True), ""))


async def named(server: Client, kind: str, name: str) -> list[Message]:
    """Returns what a server says of one thing. Raises InvalidRequest if there is none, and the errors of the calls."""
    match kind:
        case "lease":
            return [(await server.get_lease(name)).lease]
        case "transfer":
            return [(await server.get_transfer(name)).transfer]
    listing = LISTINGS[f"{kind}s"]
    if found := [message for message in await listing.ask(server) if listing.name(message) == name]:
        return [*found, await server.capabilities()] if kind == "engine" else found
    raise InvalidRequest(Reason.INVALID_FIELD, f"there is no {kind} {name}: kvgrpc get {kind}s lists them")


def ways(peer: handshake_pb2.Peer) -> list[str]:
    """Returns one line for each pair of ranks: the data path between them, and why no better one was taken."""
    state = name_of(handshake_pb2.PeerState, peer.state)
    lines = [_way(path, peer.engine_id, f"{peer.address}, {state}") for path in peer.paths]
    return lines or [readable(f"{peer.engine_id} ({peer.address}, {state}): no data path is chosen")]


def transfer_described(row: transfer_pb2.Transfer) -> list[str]:
    """Returns one line for each data path of a transfer, as `ways` has them, and then its fields."""
    lines = [_way(path, row.peer.engine_id, row.peer.address) for path in row.paths]
    rest = transfer_pb2.Transfer()
    rest.CopyFrom(row)
    for path in rest.paths:
        path.ClearField("why")
        path.ClearField("rejected_paths")
    return [*lines, *_lines(MessageToDict(rest, preserving_proto_field_name=True), "")]


def _way(path: handshake_pb2.RankPath | transfer_pb2.TransferPath, engine_id: str, about: str) -> str:
    """Returns the line of a pair of ranks: the data path between them, and why no better one was taken."""
    chosen = name_of(common_pb2.DataPath, path.data_path)
    other = "".join(f"; not {name_of(common_pb2.DataPath, row.data_path)}: {row.why}" for row in path.rejected_paths)
    return readable(
        f"rank {path.rank} with rank {path.peer_rank} of {engine_id} ({about}): {chosen}: {path.why}{other}"
    )


def _lines(value: Any, indent: str) -> Iterator[str]:
    items = value.items() if isinstance(value, dict) else [("-", one) for one in value]
    for name, one in items:
        label = f"{indent}{name}" if name == "-" else f"{indent}{name}:"
        if isinstance(one, dict | list):
            yield label
            yield from _lines(one, f"{indent}  ")
        else:
            yield f"{label} {readable(str(one))}"


def holders(reply: admin_pb2.ListPinsResponse, group: int, block: int) -> list[str]:
    """Returns one line for each holder of a block."""
    lines = [
        f"allocated as {row.allocation_id} by {row.owner}, for {_s(row.age)}{_about(row.request_id, row.label)}"
        for row in reply.allocations
    ]
    for pin in reply.pins:
        kind = name_of(admin_pb2.PinKind, pin.kind)
        peer = f" with {pin.peer_engine_id}" if pin.peer_engine_id else ""
        proof = f"; lacks the proof {pin.missing_proof}" if pin.missing_proof else ""
        trace = f"; trace {pin.trace_id}" if pin.trace_id else ""
        lines.append(f"pinned by {kind} {pin.owner}{peer}, for {_s(pin.age)}{_about(pin.request_id)}{proof}{trace}")
    return [readable(line) for line in lines] or [f"nobody holds block {block} of group {group}"]


def _about(request_id: str, label: str = "") -> str:
    return (f", request {request_id}" if request_id else "") + (f", {label}" if label else "")
