"""Modelled memory: one number for each layer of each block, so that a stale or torn read is visible.

Memory is cells of one number each. `KvStore` knows the KV of each number: its tokens, salt, layer and share. If all
engines are alike, a block has one cell of one byte in each layer, and a share is what one rank has. Otherwise a cell
has the bytes of 16 tokens of a head, and a share is a head of the model, or of longer blocks a part of a head.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from zlib import crc32

from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, Region, Strides
from sim.rules import Rule, broken

UNWRITTEN = 0


@dataclass(frozen=True)
class Prompt:
    """The input from which KV is computed."""

    tokens: tuple[int, ...]
    salt: str = ""


@dataclass(frozen=True)
class Cell:
    """Content of one cell: the KV of the last tokens of `prompt`, for one layer of one share."""

    prompt: Prompt
    region: int
    share: int


ALL_LAYERS: LayerRange = (0, 1 << 16)


def layout(blocks: int, *, aliased: bool = False) -> PoolLayout:
    """Returns a pool with two groups of different block sizes, of `blocks` blocks each. With `aliased` they share these
    blocks, and the coarser group lies on the first layer of the finer one.
    """
    space = "both" if aliased else ""
    fine = Group("fine", GroupKind.FULL_ATTENTION, 2, 16, blocks, 1, 1, "uint8", space=space)
    coarse = Group("coarse", GroupKind.FULL_ATTENTION, 1, 32, blocks, 1, 1, "uint8", space=space)
    regions = (
        Region(0, 0, 1, 0, 1, 1),
        Region(0, 1, 1, blocks, 1, 1),
        Region(1, 0, 1, 0 if aliased else 2 * blocks, 1, 1),
    )
    return PoolLayout((fine, coarse), regions, (2 if aliased else 3) * blocks)


HEADS = 2
"""Number of heads of the models of unlike engines."""


def cell_bytes(head_dim: int) -> int:
    """Returns the bytes of a cell that has keys and values of 16 tokens of a head."""
    return 2 * 16 * head_dim


def split_layout(blocks: int, ranks: int, head_dim: int, stages: int = 1) -> PoolLayout:
    """Returns the same groups for one of the engine's `ranks` ranks, with its heads one after the other in each block.
    If there are two stages, the second has the last layer of the finer group.
    """
    heads = max(HEADS // (ranks // stages), 1)
    groups, regions, ends = [], [], [0] * stages
    for index, (name, layers, tokens) in enumerate((("fine", 2, 16), ("coarse", 1, 32))):
        group = Group(name, GroupKind.FULL_ATTENTION, layers, tokens, blocks, heads, head_dim, "uint8")
        groups.append(replace(group, total_kv_heads=HEADS))
        head_bytes = cell_bytes(head_dim) * tokens // 16
        strides = Strides(0, tokens * head_dim, head_bytes, head_dim)
        for layer in range(layers):
            nbytes, stage = heads * head_bytes, min(layer, stages - 1)
            regions.append(Region(index, layer, 1, ends[stage], nbytes, nbytes, strides=strides, stage=stage))
            ends[stage] += blocks * nbytes
    return PoolLayout(tuple(groups), tuple(regions), max(ends))


class Cells:
    """Positions of the cells of blocks in the memory of one rank."""

    def __init__(self, pool: PoolLayout, rank: int = 0, ranks: int = 1) -> None:
        strides = [region.strides.head for region in pool.regions if region.strides is not None]
        self.cell_bytes = min(strides, default=1)
        """Bytes of one cell."""
        self.stage, number = divmod(rank, ranks // pool.stages)
        self.regions = [row for row in enumerate(pool.regions) if row[1].stage == self.stage]
        """Regions of this rank's stage, with their numbers."""
        self._rank = rank
        self._first_head = number * HEADS * pool.stages // ranks if strides else 0
        self.count = pool.stage_bytes[self.stage] // self.cell_bytes

    def of_block(self, region: Region, block: int) -> range:
        """Returns the cells of a block in one region."""
        first = (region.offset + block * region.stride_bytes) // self.cell_bytes
        return range(first, first + region.block_bytes // self.cell_bytes)

    def shares(self, region: Region) -> range:
        """Returns the share of each of these cells."""
        if region.strides is None:
            return range(self._rank, self._rank + 1)
        parts = region.strides.head // self.cell_bytes
        first = self._first_head * parts
        return range(first, first + region.block_bytes // self.cell_bytes)

    def of(self, blocks: Blocks) -> list[int]:
        """Returns the cells of blocks in all layers."""
        return [
            cell
            for _, region in self.regions
            for block in blocks[region.group].tolist()
            for cell in self.of_block(region, block)
        ]


def sum_of(cells: Sequence[int], which: Sequence[int]) -> int:
    """Returns the checksum of some cells, in that order."""
    return crc32(repr([cells[cell] for cell in which]).encode())


class KvStore:
    """The KV of each number, in the whole world."""

    def __init__(self) -> None:
        self._numbers: dict[Cell, int] = {}
        self._cells: list[Cell | None] = [None]
        self._rows: dict[tuple[Prompt, int, int, int], list[int]] = {}

    def number(self, cell: Cell) -> int:
        """Returns the number of that KV, the same every time."""
        number = self._numbers.get(cell)
        if number is None:
            number = self._numbers[cell] = len(self._cells)
            self._cells.append(cell)
        return number

    def row(self, prompt: Prompt, region: int, share: int, size: int) -> list[int]:
        """Returns the numbers of a prompt's blocks of `size` tokens."""
        key = prompt, region, share, size
        row = self._rows.get(key)
        if row is None:
            first, count = len(self._cells), len(prompt.tokens)
            # Equal KV may have several numbers: a search would cost more than another cell.
            for end in range(size, count + size, size):
                self._cells.append(Cell(Prompt(prompt.tokens[:end], prompt.salt), region, share))
            row = self._rows[key] = list(range(first, len(self._cells)))
        return row

    def tells(self, number: int) -> str:
        """Returns the KV of a number, as text."""
        cell = self._cells[number]
        if cell is None:
            return "nothing"
        return f"region {cell.region} of share {cell.share} for {len(cell.prompt.tokens)} tokens of another prompt"

    def holds(self, number: int, wanted: Cell) -> bool:
        """Returns True if `number` is the KV of the wanted tokens. More tokens after them do no harm."""
        found = self._cells[number]
        count = len(wanted.prompt.tokens)
        return (
            found is not None
            and (found.region, found.share, found.prompt.salt) == (wanted.region, wanted.share, wanted.prompt.salt)
            and found.prompt.tokens[:count] == wanted.prompt.tokens
        )


class Memory:
    """The cells of one rank in one life of its engine. They are not `checked` for a liar, which hurts only itself."""

    mirrored = False

    def __init__(self, pool: PoolLayout, rank: int, store: KvStore, *, checked: bool = True, ranks: int = 1) -> None:
        self._where = Cells(pool, rank, ranks)
        self.cell_bytes = self._where.cell_bytes
        self.cells = [UNWRITTEN] * self._where.count
        self._pool = pool
        self._store = store
        self._targets: dict[int, str] = {}
        """Cells that were given to a transfer to be filled, with that transfer."""
        self._filling: dict[int, Callable[[], bool]] = {}
        """Cells into which a posting writes, with a function that tells if it still can."""
        self._reading: dict[int, set[str]] = {}
        """Cells out of which this engine's own postings push, with those postings."""
        self._voided: Counter[int] = Counter()
        """Number of times that the engine has taken a cell back before its lead knows."""
        self._burnt = False
        self._checked = checked
        self._missing: set[int] = set()
        """Cells that were given to a transfer to be filled, and not written since."""

    def compute(self, blocks: Blocks, prompt: Prompt, layers: LayerRange = ALL_LAYERS) -> None:
        """Writes the KV of a prompt as the engine. The blocks are the prompt's first."""
        first, count = layers
        for number, region in self._where.regions:
            if not first <= region.first_layer < first + count:
                continue
            size = self._pool.groups[region.group].block_tokens
            rows = [self._store.row(prompt, number, share, size) for share in self._where.shares(region)]
            for block, *kv in zip(blocks[region.group].tolist(), *rows, strict=False):
                for cell, value in zip(self._where.of_block(region, block), kv, strict=True):
                    self._check_unused("used", cell)
                    self.cells[cell] = value

    def give(self, blocks: Blocks, transfer_id: str) -> None:
        """Gives blocks to a transfer: only its postings touch them until `take_back`."""
        for cell in self.cells_of(blocks):
            if cell in self._targets:
                self._in_use(f"given to {transfer_id}", cell)
            self._targets[cell] = transfer_id
            self._missing.add(cell)
            self.cells[cell] = UNWRITTEN

    def soil(self, blocks: Blocks) -> None:
        """Does work that the engine queued before it gave the blocks away: a posting must have waited for it."""
        for cell in self.cells_of(blocks):
            self.cells[cell] = UNWRITTEN

    def take_back(self, blocks: Blocks, rule: Rule = Rule.R1) -> None:
        """Takes the blocks back for the engine. `rule` is broken if a posting still writes into them."""
        for cell in self.cells_of(blocks):
            owner = self._targets.pop(cell)
            self._missing.discard(cell)
            if self._written(cell):
                self._broken(rule, f"{owner} is over while a posting writes into its cell {cell}", owner)

    def scrub(self, blocks: Blocks) -> None:
        """Recycles blocks for the engine: their contents are gone."""
        self.check_freed(blocks)
        for cell in self.cells_of(blocks):
            self.cells[cell] = UNWRITTEN

    def check_freed(self, blocks: Blocks) -> None:
        """Checks that only peers that read access blocks which the engine is about to recycle."""
        for cell in self.cells_of(blocks):
            self._check_unused("freed", cell)

    def read(self, cells: Sequence[int], posting_id: str) -> None:
        """Takes note that this engine's own posting reads until `let_go`. Reads of peers can only hurt the peers."""
        for cell in cells:
            self._reading.setdefault(cell, set()).add(posting_id)

    def let_go(self, cells: Sequence[int], posting_id: str) -> None:
        """Takes note that a reading posting has ended."""
        for cell in cells:
            readers = self._reading.get(cell, set())
            readers.discard(posting_id)
            if not readers:
                self._reading.pop(cell, None)

    def void(self, blocks: Blocks) -> None:
        """Takes note that the engine takes blocks back at once, though they may be read, before its lead knows."""
        self._voided.update(self.cells_of(blocks))

    def void_known(self, blocks: Blocks) -> None:
        """Takes note that the lead knows: peers that still read the blocks will settle STALE."""
        for cell in self.cells_of(blocks):
            self._reading.pop(cell, None)
            self._voided[cell] -= 1

    def fill(self, cells: Sequence[int], transfer_id: str, can: Callable[[], bool] = lambda: True) -> None:
        """Takes note that a posting will write here. No other may, before that posting ended or can no longer write."""
        twice = sorted(filter(self._written, cells))
        if twice:
            self._broken(Rule.R1, f"two postings write into cells {twice}", transfer_id)
        for cell in () if self._burnt else cells:
            if self._targets.get(cell) != transfer_id:
                self._trespass(cell, transfer_id)
        self._filling |= dict.fromkeys(cells, can)

    def filled(self, cells: Sequence[int], can: Callable[[], bool] | None = None) -> None:
        """Takes note that a posting has ended. With `can`, only cells that are still that posting's are released."""
        for cell in cells:
            if can is None or self._filling.get(cell) is can:
                self._filling.pop(cell, None)

    def left_on_wire(self, cells: Sequence[int], can: Callable[[], bool]) -> None:
        """Takes note that a writing process is gone. Its sent bytes may arrive while `can` returns True."""
        self._filling |= dict.fromkeys(cells, can)

    def arrive(self, cell: int, number: int, transfer_id: str) -> None:
        """Writes a cell for a mover. A write after the end of the life goes nowhere."""
        if self._burnt:
            return
        self.check_given(cell, transfer_id)
        self._missing.discard(cell)
        self.cells[cell] = number

    def check_given(self, cell: int, transfer_id: str) -> None:
        """Checks that a mover may write there for that transfer."""
        if not self._burnt and self._targets.get(cell) != transfer_id:
            self._trespass(cell, transfer_id)

    @property
    def outside(self) -> list[int]:
        """Cells that peers read and postings write."""
        return self.cells

    @property
    def given(self) -> dict[int, str]:
        """Cells that belong to transfers, with those transfers. Read only."""
        return self._targets

    def check_holds(
        self, blocks: Blocks, prompt: Prompt, use_tokens: int, layers: tuple[LayerRange, ...] = (ALL_LAYERS,),
        rule: Rule = Rule.R2, about: str = "",
    ) -> None:  # fmt: skip
        """Checks that blocks hold the KV of a prompt's first `use_tokens` tokens, and nothing else, or `rule` is
        broken.
        """
        for cell, wanted in self._expected(blocks, prompt, use_tokens):
            layer = self._pool.regions[wanted.region].first_layer
            if not any(first <= layer < first + count for first, count in layers):
                continue
            if not self._store.holds(self.cells[cell], wanted):
                found = self._store.tells(self.cells[cell])
                # A transfer in flight was taken for done.
                rule = Rule.R9 if self._written(cell) else rule
                self._broken(rule, f"cell {cell} holds other KV than was asked for: {found}", about)

    def check_filled(self, blocks: Blocks, transfer_id: str, layers: tuple[LayerRange, ...] = (ALL_LAYERS,)) -> None:
        """Checks that something has arrived in all of a transfer's blocks, whatever it is: their source lies."""
        for _, region in self._where.regions:
            if not any(first <= region.first_layer < first + count for first, count in layers):
                continue
            cells = (self._where.of_block(region, block) for block in blocks[region.group].tolist())
            if missing := self._missing.intersection(cell for some in cells for cell in some):
                what = f"{transfer_id} offers cell {min(missing)}, which nothing has filled"
                self._broken(Rule.R2, what, transfer_id)

    def burn(self) -> None:
        """Ends the life: a read that goes on gets garbage."""
        self.cells = [UNWRITTEN] * len(self.cells)
        self._burnt = True

    def _written(self, cell: int) -> bool:
        can = self._filling.get(cell)
        return can is not None and can()

    def _check_unused(self, how: str, cell: int) -> None:
        if cell in self._targets:
            self._in_use(how, cell)
        if cell in self._reading and not self._voided[cell]:
            posting_id = min(self._reading[cell])
            self._broken(Rule.R1, f"cell {cell} is {how} while posting {posting_id} reads it", posting_id)

    def _in_use(self, how: str, cell: int) -> None:
        owner = self._targets[cell]
        self._broken(Rule.R1, f"cell {cell} is {how} while {owner} may write into it", owner)

    def _trespass(self, cell: int, transfer_id: str) -> None:
        owner = self._targets.get(cell, "the engine")
        self._broken(Rule.R1, f"{transfer_id} writes into cell {cell}, which belongs to {owner}", transfer_id, owner)

    def _broken(self, rule: Rule, message: str, *about: str) -> None:
        if self._checked:
            broken(rule, message, *about)

    def _expected(self, blocks: Blocks, prompt: Prompt, use_tokens: int) -> list[tuple[int, Cell]]:
        found = []
        for number, region in self._where.regions:
            size = self._pool.groups[region.group].block_tokens
            for i, block in enumerate(blocks[region.group].tolist()):
                end = min((i + 1) * size, use_tokens)
                kv = Prompt(prompt.tokens[:end], prompt.salt)
                cells = zip(self._where.of_block(region, block), self._where.shares(region), strict=True)
                found += [(cell, Cell(kv, number, share)) for cell, share in cells]
        return found

    @property
    def stage(self) -> int:
        """Pipeline stage of its rank."""
        return self._where.stage

    def cells_of(self, blocks: Blocks) -> Sequence[int]:
        """Returns the cells of blocks in all layers that are here."""
        return self._where.of(blocks)


@dataclass(eq=False)
class MemoryDoor:
    """A way for peers into the memory of a rank, named by an endpoint, until the data path restarts."""

    key: str
    memory: Memory
    open: bool = True
    """True while ranks that have mapped the door may read and write."""
    renewed: bool = False
    """True once the data path restarted: what a dead process had sent is no longer taken from the wire."""
