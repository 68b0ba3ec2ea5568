"""Compares a liar's checksums of what is read from it with what has arrived.

If a destination compares checksums, every moved block of each rank must have a sum that the source told in that round,
and the bytes here must have that sum. So nothing is used that has no sum or another sum. Only an honest source tells
what it wrote itself: `Memory.check_holds` checks that KV directly. A liar whose sums match the arrived bytes is
believed.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvgrpc.core.actions import Post, SendChecksums
from kvgrpc.core.events import ChecksumsAnswered
from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.errors import KVGrpcError
from sim.rules import Rule, broken
from sim.world.memory import ALL_LAYERS, Memory, sum_of

SUM_BYTES = 4


@dataclass
class _Round:
    """The moves between two settles."""

    moved: dict[int, dict[int, deque[int]]] = field(default_factory=dict)
    """Cells here into which each cell of the source was read, in order; by rank and cell."""
    name: str = ""
    asked: dict[int, list[list[int]]] = field(default_factory=dict)
    """Cells of each block at the source, by number of the call."""
    told: dict[int, tuple[bytes, ...]] = field(default_factory=dict)


@dataclass
class _Block:
    """A block that has moved, in one rank."""

    rank: int
    cells: list[int]
    told: int


class Compared:
    """The transfers of one lead that read from liars."""

    def __init__(self) -> None:
        self._rounds: dict[str, _Round] = {}
        self._blocks: dict[str, list[_Block]] = {}
        """Settled blocks, by transfer."""
        self._untold: dict[str, int] = {}
        """Number of settled cells without a checksum, by transfer."""

    def posts(self, action: Post) -> None:
        """Takes note that a rank reads."""
        moved = self._rounds.setdefault(action.transfer_id, _Round()).moved.setdefault(action.rank, {})
        runs = action.runs
        for src, dst, nbytes in zip(runs.src.tolist(), runs.dst.tolist(), runs.nbytes.tolist(), strict=True):
            for i in range(nbytes):
                moved.setdefault(src + i, deque()).append(dst + i)

    def asks(self, action: SendChecksums, source: PoolLayout) -> None:
        """Takes note that the source is asked for sums. `source` is its known layout."""
        round_ = self._rounds.get(action.name[1:].rpartition("/")[0])
        if round_ is None:
            return
        if round_.name != action.name:
            round_.name, round_.asked, round_.told = action.name, {}, {}
        round_.asked[action.number] = [
            cells for blocks, layers in action.blocks for cells in _of(source, blocks, layers)
        ]

    def hears(self, event: ChecksumsAnswered) -> None:
        """Takes note of the source's answer."""
        round_ = self._rounds.get(event.name[1:].rpartition("/")[0])
        if round_ is not None and round_.name == event.name and not isinstance(event.result, KVGrpcError):
            round_.told.setdefault(event.number, event.result)

    def moving(self) -> list[str]:
        """Returns the transfers that have moved something since the last settle."""
        return list(self._rounds)

    def settles(self, transfer_id: str) -> None:
        """Ends the round: the lead asks the source for a verdict."""
        round_ = self._rounds.pop(transfer_id, None)
        if round_ is None:
            return
        settled = self._blocks.setdefault(transfer_id, [])
        for rank, moved in round_.moved.items():
            for number in sorted(round_.asked):
                told = round_.told.get(number, ())
                sums = told[rank] if rank < len(told) else b""
                asked = round_.asked[number]
                if len(sums) == SUM_BYTES * len(asked):
                    settled.extend(_blocks(rank, moved, asked, sums))
            left = sum(map(len, moved.values()))
            self._untold[transfer_id] = self._untold.get(transfer_id, 0) + left

    def forget(self, transfer_id: str) -> None:
        """Forgets a transfer that starts over."""
        for table in (self._rounds, self._blocks, self._untold):
            table.pop(transfer_id, None)

    def check(self, transfer_id: str, memories: Sequence[Memory]) -> None:
        """Checks a transfer whose settled blocks are used."""
        if self._untold.get(transfer_id):
            message = f"{transfer_id} brought {self._untold[transfer_id]} cells of which its source told no checksum"
            broken(Rule.R2, message, transfer_id)
        for block in self._blocks.get(transfer_id, ()):
            if sum_of(memories[block.rank].cells, block.cells) != block.told:
                message = f"{transfer_id} holds other KV in cells {block.cells} than its source has summed up"
                broken(Rule.R2, message, transfer_id)

    def life_began(self) -> None:
        """Forgets the last life, whose memory is gone."""
        for table in (self._rounds, self._blocks, self._untold):
            table.clear()


def _of(pool: PoolLayout, blocks: Blocks, layers: LayerRange | None) -> list[list[int]]:
    """Returns the cells of each block, one list for each sum."""
    first, count = layers or ALL_LAYERS
    found = []
    for group, ids in enumerate(blocks):
        regions = [r for r in pool.regions if r.group == group and first <= r.first_layer < first + count]
        found += [[r.offset + block * r.stride_bytes for r in regions] for block in ids.tolist() if regions]
    return found


def _blocks(rank: int, moved: dict[int, deque[int]], asked: list[list[int]], sums: bytes) -> list[_Block]:
    """Returns the moved blocks that have sums, and takes them out of `moved`."""
    found = []
    for i, cells in enumerate(asked):
        if all(moved.get(cell) for cell in cells):
            here = sorted(moved[cell].popleft() for cell in cells)
            found.append(_Block(rank, here, int.from_bytes(sums[SUM_BYTES * i : SUM_BYTES * (i + 1)], "little")))
    return found
