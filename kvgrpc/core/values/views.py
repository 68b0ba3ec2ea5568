"""The strided view of a block, and who has which heads: all that exchanging blocks between unlike engines rests on.

A block of one region is an array [layers, keys and values, heads, tokens] of runs: the elements of one head of one
token. What an engine's ranks have of a model's heads follows from their number.
"""

from dataclasses import dataclass
from typing import NamedTuple

from kvgrpc.core.values.groups import PARTS
from kvgrpc.core.values.layout import ITEM_BYTES, Group, GroupKind, PoolLayout, Region, Strides, TensorKind
from kvgrpc.errors import FieldViolation, InvalidRequest, Reason


@dataclass(frozen=True)
class View:
    """A block of one region, as an array."""

    first_layer: int
    layers: int
    first_part: int
    """0: keys, or latents; 1: values."""
    parts: int
    heads: int
    tokens: int
    run_bytes: int
    """Bytes of one head of one token, which stand side by side; where tokens cannot be told apart, of one head."""
    strides: Strides
    elements: int
    """Of one head of one token."""

    @property
    def tells_tokens(self) -> bool:
        """Whether it is known where each token of a head is."""
        return _tells_tokens(self.strides)

    def inner(self, part: int) -> tuple[int, int]:
        """Bytes from one token of a head to the next, and from one element of a token to the next."""
        item_bytes = self.run_bytes // self.elements
        if self.strides.key_element and part == 0:
            return item_bytes, self.strides.key_element
        return self.strides.token, item_bytes


def view_of(group: Group, region: Region) -> View | None:
    """The view of a block of a region; None: nothing is known of its inside, and it is moved whole."""
    if group.kind is GroupKind.STATE or group.dtype not in ITEM_BYTES:
        return None
    first_part, parts = int(region.tensor is TensorKind.V), len(PARTS[region.tensor])
    run_bytes = group.head_dim * ITEM_BYTES[group.dtype]
    strides = region.strides or _packed(group, parts, run_bytes)
    if not _tells_tokens(strides):
        head_bytes = run_bytes * parts * group.block_tokens
        known = strides.head or (group.kv_heads == 1 and any(strides))
        whole = View(region.first_layer, region.layers, first_part, 1, group.kv_heads, 1, head_bytes, strides, 1)
        return whole if known else None
    if region.strides is None and strides.layer * region.layers != region.block_bytes:
        return None
    return View(
        region.first_layer, region.layers, first_part, parts, group.kv_heads, group.block_tokens, run_bytes, strides,
        group.head_dim,
    )  # fmt: skip


def _tells_tokens(strides: Strides) -> bool:
    return bool(strides.token or strides.key_element)


def _packed(group: Group, parts: int, run_bytes: int) -> Strides:
    heads, tokens = group.kv_heads, group.block_tokens
    part = run_bytes * heads * tokens
    if group.order == "head_major":
        return Strides(part * parts, part, run_bytes * tokens, run_bytes)
    return Strides(part * parts, part, run_bytes, run_bytes * heads)


class Share(NamedTuple):
    """Heads of one group that a rank of the destination gets from a rank of the source."""

    rank: int
    """The destination's."""
    source_rank: int
    first: int
    """The first of them, among the heads of the destination's rank."""
    source_first: int
    """The same, among the heads of the source's."""
    heads: int
    stage: int = 0
    """The destination's pipeline stage."""
    source_stage: int = 0
    section: int | None = None
    """Of a state that is split among ranks in another way: which section of it. `first`, `source_first` and `heads` are
    bytes of that.
    """


def total_heads(group: Group, ranks: int) -> int:
    """KV heads of the model, of which the `ranks` ranks of a stage have their shares. Of latents there is one."""
    if group.kind is GroupKind.MLA:
        return group.kv_heads
    return group.total_kv_heads or group.kv_heads * ranks


def check_heads(pool: PoolLayout, ranks: int) -> None:
    """Raises InvalidRequest (INVALID_FIELD) unless so many ranks form equal pipeline stages, and the heads of each
    group can be those of the ranks of a stage: as many on each of them, or one on each, which as many ranks have as
    any other.
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


def shares(source: Group, source_ranks: int, destination: Group, ranks: int) -> list[Share]:
    """What each rank of the destination gets from whom: every head of its own once.

    Both groups are of as many heads in all. Of ranks of the source that have the same head each serves as many of the
    destination's, and where both engines are split alike each rank serves its own number.
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
            found.append(Share(rank, source_rank, at - mine, at % source.kv_heads, stop - at))
            at = stop
    return found


def _copies(group: Group, ranks: int) -> int:
    """How many ranks have the same heads."""
    return ranks * group.kv_heads // total_heads(group, ranks)


def _shares_of_sections(source: Group, source_ranks: int, destination: Group, ranks: int) -> list[Share]:
    """The same of a state: every byte of every section once. Of ranks that have the same, that one serves which has the
    most of the other sections.
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
                share = Share(rank, source_rank, at - mine, at % here.nbytes, stop - at, section=number)
                found.append(share)
                at = stop
    return found
