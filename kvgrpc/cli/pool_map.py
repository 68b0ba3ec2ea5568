"""The map of a block space: one letter for each block, or for each stretch of blocks of a large pool."""

from collections.abc import Sequence

from kvgrpc import client
from kvgrpc.v1 import admin_pb2, pool_pb2

LEGEND = ". free  a allocated  L leased  A read by a peer  T target of a transfer  Q quarantine"
_PINS = {
    admin_pb2.PIN_KIND_LEASE: "L",
    admin_pb2.PIN_KIND_ACCESS: "A",
    admin_pb2.PIN_KIND_TARGET: "T",
}
_ORDER = ".aLATQ"
"""Letters, weakest first: a block with several of them shows the last."""


def letters(
    groups: Sequence[int],
    blocks: int,
    pins: Sequence[admin_pb2.Pin],
    allocations: Sequence[pool_pb2.Allocation],
    cells_max: int,
) -> str:
    """Returns at most `cells_max` letters for the block space of `groups`. A stretch shows its strongest letter."""
    per_cell = max(1, -(-blocks // cells_max))
    rank = [0] * -(-blocks // per_cell)
    held = [("a", row.blocks) for row in allocations] + [(_PINS.get(row.kind, "Q"), row.blocks) for row in pins]
    for letter, shown in held:
        strength = _ORDER.index(letter)
        for block in (block for group in groups for block in client.block_ids(shown, group)):
            if block < blocks:
                rank[block // per_cell] = max(rank[block // per_cell], strength)
    return "".join(_ORDER[strength] for strength in rank)
