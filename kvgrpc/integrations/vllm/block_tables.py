"""Block tables of vLLM: for each group the numbers of a request's blocks, in order."""

from kvgrpc.core.policy.values import DROPPED, Table

NULL_BLOCK = 0
"""Number that stands in vLLM's tables for blocks that are not there, or not any more, since their tokens left the
window. All requests share this block: it is never read or written.
"""


def blocks_of(table: tuple[list[int], ...]) -> list[int]:
    """Returns the blocks of all groups that are there."""
    return [block for ids in table for block in ids if block != NULL_BLOCK]


def without_null(table: tuple[list[int], ...]) -> Table:
    """Returns the table as a Scheduler takes it."""
    return [[DROPPED if block == NULL_BLOCK else block for block in ids] if NULL_BLOCK in ids else ids for ids in table]
