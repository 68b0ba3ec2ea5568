"""Checks and sums of the block counts that a call asks for."""

from collections.abc import Mapping

from kvgrpc.core.state.node_state import NodeState
from kvgrpc.errors import FieldViolation, InvalidRequest, OutOfRange, Reason, invalid, too_many


def check_counts(rows: tuple[tuple[int, int], ...], state: NodeState) -> dict[int, int]:
    """Returns counts by group from the rows (group, count) of a caller, after checks against the pool and its limits.

    Raises InvalidRequest or OutOfRange. At least one block must be asked for.
    """
    groups = state.life.engine.pool.groups
    counts: dict[int, int] = {}
    for row, (group, count) in enumerate(rows):
        if not 0 <= group < len(groups) or group in counts:
            why = "is named twice" if group in counts else f"does not exist; the pool has {len(groups)}"
            what = f"group {group} {why}"
            violation = FieldViolation(f"group_block_counts[{row}].group", what)
            raise InvalidRequest(Reason.GROUP_MISMATCH, what, violations=(violation,))
        counts[group] = count
    total = sum(counts.values())
    if total <= 0 or min(counts.values()) < 0:
        raise invalid("group_block_counts", "asks for no block")
    if total > (most := state.limits.blocks_per_request):
        text = f"{total} blocks in one request; the limit is {most}"
        raise too_many(text, most, "group_block_counts", "blocks in one request")
    for row, (group, count) in enumerate(rows):
        if count > groups[group].blocks:
            raise OutOfRange(
                Reason.LIMIT_EXCEEDED,
                f"{count} blocks of group {group} were asked for, which has {groups[group].blocks} in all",
                violations=(FieldViolation(f"group_block_counts[{row}]", f"at most {groups[group].blocks} blocks"),),
                metadata={"group": str(group), "block_count": str(groups[group].blocks)},
            )
    for space, count in by_space(counts, state).items():
        group = state.pool.pins.spaces.index(space)
        if count > groups[group].blocks:
            raise OutOfRange(
                Reason.LIMIT_EXCEEDED,
                f"{count} blocks of the space of group {group} were asked for, which has {groups[group].blocks} in all",
                violations=(FieldViolation("group_block_counts", f"at most {groups[group].blocks} blocks of a space"),),
                metadata={"group": str(group), "block_count": str(groups[group].blocks)},
            )
    return counts


def by_space(counts: Mapping[int, int], state: NodeState) -> dict[int, int]:
    """Returns counts by space for counts by group."""
    found: dict[int, int] = {}
    for group, count in counts.items():
        space = state.pool.pins.spaces[group]
        found[space] = found.get(space, 0) + count
    return found
