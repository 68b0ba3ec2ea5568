"""Rows of `kvgrpc top`: pure, from what leads answered to lines of text.

A row keeps values, and only rows that are on the screen become text. Rates come from two readings of one life.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvgrpc.cli import pool_map
from kvgrpc.cli.terminal import readable
from kvgrpc.client import in_seconds, name_of
from kvgrpc.v1 import admin_pb2, common_pb2, handshake_pb2, lease_pb2, pool_pb2, transfer_pb2

MAP_CELLS = 32
"""Width of a pool's map, in letters."""
GAP = "  "
Value = str | float


@dataclass(frozen=True)
class Reading:
    """Answers of one lead at one time. `replies` has what the view asked for; `error` says why a lead is away."""

    address: str
    at_s: float
    replies: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def engine_id(self) -> str:
        return str(self.replies["status"].header.engine_id) if "status" in self.replies else ""

    @property
    def incarnation(self) -> int:
        return int(self.replies["status"].header.incarnation) if "status" in self.replies else 0


@dataclass(frozen=True)
class TopRow:
    """One thing at one lead. `name` is its id."""

    address: str
    engine_id: str
    name: str
    values: tuple[Value, ...]

    @property
    def key(self) -> tuple[str, str]:
        return (self.address, self.name)


@dataclass(frozen=True)
class TopView:
    """One kind of rows: what to ask for, and the columns, the most important first."""

    asks: tuple[str, ...]
    columns: tuple[tuple[str, Callable[[Any], str]], ...]
    rows: Callable[[Reading, Reading | None], Iterable[TopRow]]
    descends: bool
    """True if the view is descending at first."""
    first: int = 0
    """Column by which the view is sorted at first."""


def text(value: Value) -> str:
    """Returns an id, a name or a sentence, which anybody may have sent, in one line."""
    return readable(str(value))


def count(value: Value) -> str:
    """Returns a number in six columns."""
    return f"{value:>6}"


def seconds(value: float) -> str:
    """Returns a time in at most seven columns."""
    if value < 100:
        return f"{value:5.1f}s"
    return f"{value / 60:5.0f}m" if value < 6000 else f"{value / 3600:5.0f}h"


def amount(value: float) -> str:
    """Returns bytes in nine columns."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:6.0f} {unit:2}" if unit == "B" else f"{value:6.1f} {unit:2}"
        value /= 1000
    raise AssertionError


def rate(value: float) -> str:
    """Returns bytes a second, or blanks where nothing moves."""
    return f"{amount(value)}/s" if value > 0 else ""


def percent(value: float) -> str:
    """Returns a share in six columns."""
    return f"{value:4.0f} %"


def _blocks(blocks: common_pb2.Blocks) -> int:
    return sum(sum(row.runs.counts) for row in blocks.groups)


def _per_second(new: float, old: float, between_s: float) -> float:
    return max(0.0, new - old) / between_s if between_s > 0 else 0.0


def _engines(now: Reading, before: Reading | None) -> Iterable[TopRow]:
    if now.error or "status" not in now.replies:
        yield TopRow(now.address, "", now.address, (now.address, "away", now.address, *[""] * 8, now.error))
        return
    state: admin_pb2.GetStatusResponse = now.replies["status"]
    counts, speed, ends = state.counts, 0.0, 0.0
    if before is not None and before.incarnation == now.incarnation:
        old, between_s = before.replies["status"].counts, now.at_s - before.at_s
        speed = _per_second(counts.received_bytes, old.received_bytes, between_s)
        ends = _per_second(_ended(counts), _ended(old), between_s)
    yield TopRow(
        now.address, now.engine_id, now.engine_id,
        (
            now.engine_id, name_of(handshake_pb2.Admission, state.admission), now.address, in_seconds(state.uptime),
            counts.pending_transfer_count + counts.active_transfer_count, counts.lease_count, speed, ends,
            counts.quarantined_block_count, counts.failed_transfer_count, state.version, state.admission_reason,
        ),
    )  # fmt: skip


def _ended(counts: admin_pb2.Counts) -> int:
    return counts.succeeded_transfer_count + counts.failed_transfer_count + counts.cancelled_transfer_count


def _pools(now: Reading, _: Reading | None) -> Iterable[TopRow]:
    groups: Sequence[pool_pb2.GroupStatus] = now.replies["pool"].groups if now.replies.get("pool") else ()
    for index, group in enumerate(groups):
        drawn = pool_map.letters(
            [index], group.block_count, now.replies["pins"].pins, now.replies["allocations"].allocations, MAP_CELLS
        )
        yield TopRow(
            now.address, now.engine_id, f"{index}",
            (
                now.engine_id, group.name, drawn, group.free_block_count, group.block_count,
                group.allocated_block_count, group.leased_block_count, group.target_block_count,
                group.quarantined_block_count,
            ),
        )  # fmt: skip


def _leases(now: Reading, _: Reading | None) -> Iterable[TopRow]:
    row: lease_pb2.Lease
    for row in now.replies["leases"].leases:
        yield TopRow(
            now.address, now.engine_id, row.lease_id,
            (
                row.lease_id, now.engine_id, in_seconds(row.remaining), in_seconds(row.age), _blocks(row.blocks),
                row.request_id, f"{row.done_consumer_count}/{row.consumer_count}", row.open_access_count,
                row.renewal_count,
            ),
        )  # fmt: skip


def _transfers(now: Reading, before: Reading | None) -> Iterable[TopRow]:
    old: dict[str, int] = {}
    if before is not None and before.incarnation == now.incarnation and "transfers" in before.replies:
        old = {row.transfer_id: row.moved_bytes for row in before.replies["transfers"].transfers}
    between_s = now.at_s - before.at_s if before is not None else 0.0
    row: transfer_pb2.Transfer
    for row in now.replies["transfers"].transfers:
        moved = _per_second(row.moved_bytes, old.get(row.transfer_id, row.moved_bytes), between_s)
        phase = name_of(common_pb2.TransferPhase, row.phases[-1].phase) if row.phases else ""
        why = (
            name_of(common_pb2.FailureReason, row.failure.reason) if row.HasField("failure")
            else name_of(transfer_pb2.WaitingFor, row.waiting_for) if row.waiting_for else ""
        )  # fmt: skip
        yield TopRow(
            now.address, now.engine_id, row.transfer_id,
            (
                row.transfer_id, name_of(transfer_pb2.TransferState, row.state), moved,
                100.0 * row.moved_bytes / row.total_bytes if row.total_bytes else 0.0,
                name_of(common_pb2.DataPath, row.paths[0].data_path) if row.paths else "", phase, now.engine_id,
                row.peer.engine_id, row.request_id, float(row.total_bytes), in_seconds(row.age), why,
            ),
        )  # fmt: skip


def _peers(now: Reading, _: Reading | None) -> Iterable[TopRow]:
    row: handshake_pb2.Peer
    for row in now.replies["peers"].peers:
        path = row.paths[0] if row.paths else handshake_pb2.RankPath()
        yield TopRow(
            now.address, now.engine_id, f"{row.engine_id} {row.incarnation}",
            (
                row.engine_id, now.engine_id, name_of(handshake_pb2.PeerState, row.state),
                name_of(common_pb2.DataPath, path.data_path) if row.paths else "", in_seconds(row.silence),
                row.open_access_count, row.address, path.why,
            ),
        )  # fmt: skip


def _quarantine(now: Reading, _: Reading | None) -> Iterable[TopRow]:
    row: admin_pb2.Pin
    for row in now.replies["pins"].pins:
        if row.kind not in (admin_pb2.PIN_KIND_QUARANTINE, admin_pb2.PIN_KIND_UNSPECIFIED):
            continue
        yield TopRow(
            now.address, now.engine_id, row.owner,
            (
                row.owner, now.engine_id, _blocks(row.blocks), row.missing_proof, in_seconds(row.age),
                row.peer_engine_id, row.request_id,
            ),
        )  # fmt: skip


VIEWS: dict[str, TopView] = {
    "engines": TopView(
        (),
        (
            ("ENGINE", text), ("STATE", text), ("ADDRESS", text), ("UP", seconds), ("TRANSFERS", count),
            ("LEASES", count), ("IN", rate), ("ENDED/S", lambda value: f"{value:7.1f}"), ("QUARANTINED", count),
            ("FAILED", count), ("VERSION", text), ("WHY", text),
        ),
        _engines, descends=False,
    ),
    "pools": TopView(
        ("pool", "pins", "allocations"),
        (
            ("ENGINE", text), ("GROUP", text), ("MAP", text), ("FREE", count), ("BLOCKS", count),
            ("ALLOCATED", count), ("LEASED", count), ("TARGETS", count), ("QUARANTINED", count),
        ),
        _pools, descends=False,
    ),
    "leases": TopView(
        ("leases",),
        (
            ("LEASE", text), ("ENGINE", text), ("LEFT", seconds), ("AGE", seconds), ("BLOCKS", count),
            ("REQUEST", text), ("DONE", text), ("READING", count), ("RENEWED", count),
        ),
        _leases, descends=False, first=2,
    ),
    "transfers": TopView(
        ("transfers",),
        (
            ("TRANSFER", text), ("STATE", text), ("RATE", rate), ("MOVED", percent), ("PATH", text), ("PHASE", text),
            ("ENGINE", text), ("PEER", text), ("REQUEST", text), ("BYTES", amount), ("AGE", seconds), ("WHY", text),
        ),
        _transfers, descends=False, first=10,
    ),
    "peers": TopView(
        ("peers",),
        (
            ("PEER", text), ("ENGINE", text), ("STATE", text), ("PATH", text), ("SILENCE", seconds),
            ("ACCESSES", count), ("ADDRESS", text), ("WHY", text),
        ),
        _peers, descends=False,
    ),
    "quarantine": TopView(
        ("pins",),
        (
            ("OWNER", text), ("ENGINE", text), ("BLOCKS", count), ("MISSING PROOF", text), ("AGE", seconds),
            ("PEER", text), ("REQUEST", text),
        ),
        _quarantine, descends=True, first=4,
    ),
}  # fmt: skip
"""Views by name, in the order of their keys."""


def rows_of(view: str, now: Reading, before: Reading | None) -> list[TopRow]:
    """Returns the rows of one lead. A lead that is away, or not yet asked, has a row of engines only."""
    asks = VIEWS[view].asks
    if asks and (now.error or any(now.replies.get(name) is None for name in asks)):
        return []
    old = before if before is not None and not before.error else None
    return list(VIEWS[view].rows(now, old))


def arranged(rows: Iterable[TopRow], column: int, wanted: str, *, descends: bool) -> list[TopRow]:
    """Returns the rows that have `wanted` in one of their texts, sorted by a column. Blanks come last."""
    word = wanted.casefold()
    kept = [row for row in rows if not word or any(word in str(value).casefold() for value in row.values)]
    full = sorted((row for row in kept if row.values[column] != ""), key=lambda row: row.name)
    full.sort(key=lambda row: row.values[column], reverse=descends)
    return full + [row for row in kept if row.values[column] == ""]


class TopLines:
    """The table as text: columns as wide as their texts, and as many of them as fit. Ids are never cut."""

    def __init__(self, view: str, rows: Sequence[TopRow], width: int) -> None:
        self._columns, self._rows = VIEWS[view].columns, rows
        self._widths, used = [], 0
        for index, (title, form) in enumerate(self._columns):
            wide = max(len(title), max((len(cell(form, row.values[index])) for row in rows), default=0))
            used += wide + (len(GAP) if index else 0)
            if index and used > width:
                break
            self._widths.append(wide)

    @property
    def left_out(self) -> int:
        """Number of columns that do not fit."""
        return len(self._columns) - len(self._widths)

    def head(self, column: int, *, descends: bool) -> str:
        """Returns the titles. The title of the column that sorts has an arrow where it has room."""
        arrow = "v" if descends else "^"
        titles = [title for title, _ in self._columns[: len(self._widths)]]
        if column < len(titles) and len(titles[column]) < self._widths[column]:
            titles[column] += arrow
        return GAP.join(title.ljust(wide) for title, wide in zip(titles, self._widths, strict=True)).rstrip()

    def line(self, index: int) -> str:
        values = self._rows[index].values
        pairs = zip(self._columns, self._widths, values, strict=False)
        return GAP.join(cell(form, value).ljust(wide) for (_, form), wide, value in pairs).rstrip()


def cell(form: Callable[[Any], str], value: Value) -> str:
    """Returns the text of one value. An empty text stands for a value that is not known."""
    return "" if value == "" else form(value)
