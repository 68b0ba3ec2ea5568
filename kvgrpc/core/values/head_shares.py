"""Shares of heads: which rank of the destination gets which heads from which rank of the source.

A rank's number determines its heads of the model. Exchange between engines of different TP is built on that.
"""

from typing import NamedTuple

from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout
from kvgrpc.errors import FieldViolation, InvalidRequest, Reason


class HeadShare(NamedTuple):
    """Heads of one group that a rank of the destination gets from a rank of the source."""

    rank: int
    """Rank of the destination."""
    source_rank: int
    first: int
    """Index of the first of these heads at the destination's rank."""
    source_first: int
    """Index of the first of these heads at the source's rank."""
    heads: int
    stage: int = 0
    """Pipeline stage of the destination."""
    source_stage: int = 0
    section: int | None = None
    """Section number, for a state that is split among ranks differently. `first`, `source_first` and `heads` are then
    bytes of the section.
    """


def total_heads(group: Group, ranks: int) -> int:
    """Returns the KV heads that the `ranks` ranks of a stage share. Latents, the same on all ranks, count once."""
    if group.kind is GroupKind.MLA:
        return group.kv_heads
    return group.total_kv_heads or group.kv_heads * ranks


def check_heads(pool: PoolLayout, ranks: int) -> None:
    """Raises InvalidRequest (INVALID_FIELD) unless the ranks form equal pipeline stages and can share the heads of each
    group. In a stage either all heads are divided evenly, or each rank has one head and each head is on the same number
    of ranks.
    """
    found = []
    if ranks % pool.stages:
        why = f"{ranks} ranks form no {pool.stages} stages of as many ranks each"
        raise InvalidRequest(Reason.INVALID_FIELD, why, violations=(FieldViolation("regions", why),))
    ranks //= pool.stages
    for i, group in enumerate(pool.groups):
        if any(ranks * section.nbytes % section.total_bytes for section in group.sections):
            found.append(FieldViolation(f"groups[{i}].sections", f"{ranks} ranks have no equal shares of them"))
        total = group.total_kv_heads
        shared = ranks % total == 0 and group.kv_heads == 1 if total else True
        if not shared and total != group.kv_heads * ranks:
            why = f"{ranks} ranks with {group.kv_heads} heads each have no equal shares of {total}"
            found.append(FieldViolation(f"groups[{i}].total_kv_heads", why))
    if found:
        raise InvalidRequest(Reason.INVALID_FIELD, "the heads are not those of the ranks", violations=tuple(found))


def shares(source: Group, source_ranks: int, destination: Group, ranks: int) -> list[HeadShare]:
    """Returns what each rank of the destination gets from which rank: every head of its own once.

    Both groups must have the same heads in all. If several ranks of the source have a head, each serves the same number
    of the destination's ranks. If both engines are split alike, each rank serves its own number.
    """
    if source.sections and destination.sections and (source.sections, source_ranks) != (destination.sections, ranks):
        return _shares_of_sections(source, source_ranks, destination, ranks)
    copies, source_copies = _copies(destination, ranks), _copies(source, source_ranks)
    found = []
    for rank in range(ranks):
        mine = rank // copies * destination.kv_heads
        at, end = mine, mine + destination.kv_heads
        while at < end:
            owner = at // source.kv_heads
            stop = min(end, (owner + 1) * source.kv_heads)
            source_rank = owner * source_copies + rank % source_copies
            found.append(HeadShare(rank, source_rank, at - mine, at % source.kv_heads, stop - at))
            at = stop
    return found


def _copies(group: Group, ranks: int) -> int:
    """Returns the number of ranks that have the same heads."""
    return ranks * group.kv_heads // total_heads(group, ranks)


def _shares_of_sections(source: Group, source_ranks: int, destination: Group, ranks: int) -> list[HeadShare]:
    """Returns the shares of a state: every byte of every section once. Among ranks that have the same bytes, the one
    with most of the other sections serves them.
    """
    found = []
    for number, (here, there) in enumerate(zip(source.sections, destination.sections, strict=True)):
        source_copies = source_ranks * here.nbytes // here.total_bytes
        copies = ranks * there.nbytes // there.total_bytes
        for rank in range(ranks):
            mine = rank // copies * there.nbytes
            at, end = mine, mine + there.nbytes
            while at < end:
                owner = at // here.nbytes
                stop = min(end, (owner + 1) * here.nbytes)
                first = owner * source_copies
                source_rank = min(max(rank * source_ranks // ranks, first), first + source_copies - 1)
                share = HeadShare(rank, source_rank, at - mine, at % here.nbytes, stop - at, section=number)
                found.append(share)
                at = stop
    return found
