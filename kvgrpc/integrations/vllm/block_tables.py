"""VLLM's block tables: of each group the numbers of a request's blocks, in their order."""

from kvgrpc.core.policy.values import DROPPED, Table

NULL_BLOCK = 0
"""In vLLM's tables it stands for blocks that are not there, or not any more, since their tokens have left the window.
All requests share it: nothing may be read or written.
"""


def blocks_of(table: tuple[list[int], ...]) -> list[int]:
    """The blocks of all groups."""
    return [block for ids in table for block in ids if block != NULL_BLOCK]


def without_null(table: tuple[list[int], ...]) -> Table:
    """The table as a Scheduler takes it."""
    return [[DROPPED if block == NULL_BLOCK else block for block in ids] if NULL_BLOCK in ids else ids for ids in table]
