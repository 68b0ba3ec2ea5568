"""The checksums that a liar tells of what is read from it, and what has arrived.

What is promised where a destination compares checksums: of each block that was moved, and of each rank, the source has
told a sum in that round, and what lies here has that sum. So nothing is used of which no sum came, or another one than
that of what arrived. What the source itself has written only an honest one tells: there KV is looked at as it is
(`Memory.check_holds`). A liar whose sums are those of what arrived is believed, whatever that is.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvgrpc.core.actions import Post, SendChecksums
from kvgrpc.core.events import ChecksumsAnswered
from kvgrpc.core.values.calls import LayerRange
from kvgrpc.core.values.descriptors import Blocks
from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.errors import KVGrpcError
from kvgrpc.sim.rules import Rule, broken
from kvgrpc.sim.world.memory import ALL_LAYERS, Memory, sum_of

SUM_BYTES = 4


@dataclass
class _Round:
    """What moves until it is settled."""

    moved: dict[int, dict[int, deque[int]]] = field(default_factory=dict)
    """By rank, cells of the source, and the cells here into which they were read, in their order."""
    name: str = ""
    asked: dict[int, list[list[int]]] = field(default_factory=dict)
    """By number of the call: the cells of each block at the source."""
    told: dict[int, tuple[bytes, ...]] = field(default_factory=dict)


@dataclass
class _Block:
    """A block that has moved, as one rank has it."""

    rank: int
    cells: list[int]
    told: int


class Compared:
    """The transfers of one lead that read from liars."""

    def __init__(self) -> None:
        self._rounds: dict[str, _Round] = {}
        self._blocks: dict[str, list[_Block]] = {}
        """What was settled, by transfer."""
        self._untold: dict[str, int] = {}
        """How many cells were settled of which the source has told nothing."""

    def posts(self, action: Post) -> None:
        """A rank reads."""
        moved = self._rounds.setdefault(action.transfer_id, _Round()).moved.setdefault(action.rank, {})
        runs = action.runs
        for src, dst, nbytes in zip(runs.src.tolist(), runs.dst.tolist(), runs.nbytes.tolist(), strict=True):
            for i in range(nbytes):
                moved.setdefault(src + i, deque()).append(dst + i)

    def asks(self, action: SendChecksums, source: PoolLayout) -> None:
        """The source is asked for sums. `source`: its layout, as it is known."""
        round_ = self._rounds.get(action.name[1:].rpartition("/")[0])
        if round_ is None:
            return
        if round_.name != action.name:
            round_.name, round_.asked, round_.told = action.name, {}, {}
        round_.asked[action.number] = [
            cells for blocks, layers in action.blocks for cells in _of(source, blocks, layers)
        ]

    def hears(self, event: ChecksumsAnswered) -> None:
        """It answers, or not."""
        round_ = self._rounds.get(event.name[1:].rpartition("/")[0])
        if round_ is not None and round_.name == event.name and not isinstance(event.result, KVGrpcError):
            round_.told.setdefault(event.number, event.result)

    def moving(self) -> list[str]:
        """Transfers of which something has moved that is not settled."""
        return list(self._rounds)

    def settles(self, transfer_id: str) -> None:
        """The round is over for the lead: it asks whether the source's side held."""
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
        """It starts over: nothing of it counts."""
        for table in (self._rounds, self._blocks, self._untold):
            table.pop(transfer_id, None)

    def check(self, transfer_id: str, memories: Sequence[Memory]) -> None:
        """What was settled is used."""
        if self._untold.get(transfer_id):
            message = f"{transfer_id} brought {self._untold[transfer_id]} cells of which its source told no checksum"
            broken(Rule.R2, message, transfer_id)
        for block in self._blocks.get(transfer_id, ()):
            if sum_of(memories[block.rank].cells, block.cells) != block.told:
                message = f"{transfer_id} holds other KV in cells {block.cells} than its source has summed up"
                broken(Rule.R2, message, transfer_id)

    def life_began(self) -> None:
        """Another memory."""
        for table in (self._rounds, self._blocks, self._untold):
            table.clear()


def _of(pool: PoolLayout, blocks: Blocks, layers: LayerRange | None) -> list[list[int]]:
    """The cells of each block, one list for each sum."""
    first, count = layers or ALL_LAYERS
    found = []
    for group, ids in enumerate(blocks):
        regions = [r for r in pool.regions if r.group == group and first <= r.first_layer < first + count]
        found += [[r.offset + block * r.stride_bytes for r in regions] for block in ids.tolist() if regions]
    return found


def _blocks(rank: int, moved: dict[int, deque[int]], asked: list[list[int]], sums: bytes) -> list[_Block]:
    """What was told of what has moved; that is taken out of `moved`."""
    found = []
    for i, cells in enumerate(asked):
        if all(moved.get(cell) for cell in cells):
            here = sorted(moved[cell].popleft() for cell in cells)
            found.append(_Block(rank, here, int.from_bytes(sums[SUM_BYTES * i : SUM_BYTES * (i + 1)], "little")))
    return found
