"""The life of the engine behind a lead: its description, whether the lead takes work for it, and its pool.

The pool's tables say which blocks are given out and pinned, and which may not be named.
"""

from collections.abc import Sequence
from dataclasses import replace

from kvgrpc.core.events import LifeBegan
from kvgrpc.core.state.waiting_rows import Proofs
from kvgrpc.core.tables.allocator import Allocator
from kvgrpc.core.tables.ledger import Ledger
from kvgrpc.core.tables.pins import PinTable
from kvgrpc.core.values.block_ids import NO_IDS, BlockLists, Blocks, check_ids, check_spaces
from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.grants import signing_key
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.owners import ENGINE, EVERYONE, Thing, ThingKind, Verb, may
from kvgrpc.errors import (
    Aborted,
    Exhausted,
    FieldViolation,
    InvalidRequest,
    PermissionDenied,
    PreconditionFailed,
    Reason,
    Unavailable,
    too_many,
)

NO_LIFE = LifeBegan(0, b"", None)
"""A lead's time before its first life."""


class EngineLife:
    """The present life. One object stands for all lives of a lead, one after the other."""

    def __init__(self) -> None:
        self.draining = False
        self.drain_began = 0.0
        """Time at which the present drain began."""
        self.drain_reason = ""
        """Reason of the present drain, if one was stated. Empty without a drain."""
        self.stopping = False
        """True when the server was told to end. It then drains for good."""
        self.defect = ""
        """Reason why there is no engine, from a life's defect until the next life begins. Empty otherwise."""
        self.begin(NO_LIFE, 0.0)

    def begin(self, event: LifeBegan, now: float) -> None:
        self.incarnation, self.secret = event.incarnation, event.secret
        self.grant_key = signing_key(event.secret)
        self.description = event.description
        self.attached = event.engine_attached
        self.sets_aside, self.expects_pushes, self.mirrored = event.sets_aside, event.expects_pushes, event.mirrored
        self.began = now
        self.defect = "" if event.description else self.defect

    def drain(self, reason: str, now: float, *, stopping: bool = False) -> None:
        """Takes no new work from now on; with `stopping` for good. A drain that goes on keeps its beginning, and its
        reason if no new one is stated.
        """
        if not self.draining:
            self.draining, self.drain_began = True, now
        self.drain_reason = reason or self.drain_reason
        self.stopping = self.stopping or stopping

    def cancel_drain(self) -> None:
        """Takes new work again, unless the server was told to end."""
        if not self.stopping:
            self.draining, self.drain_reason = False, ""

    def go_on_draining(self, earlier: "EngineLife") -> None:
        """Takes over whether and why another life's server drains."""
        self.draining, self.stopping = earlier.draining, earlier.stopping
        self.drain_began, self.drain_reason = earlier.drain_began, earlier.drain_reason

    @property
    def engine(self) -> EngineDescription:
        """This engine's description. Raises Unavailable (NO_POOL, INTERNAL_DEFECT) while there is none."""
        if self.description is None and self.defect:
            raise Unavailable(Reason.INTERNAL_DEFECT, self.defect, retry_delay_s=1.0)
        if self.description is None:
            raise Unavailable(
                Reason.NO_POOL, "no engine is attached to this server and it has no pool of its own", retry_delay_s=1.0
            )
        return self.description

    def check(self, incarnation: int) -> None:
        """Raises Aborted (INCARNATION_CHANGED) when block ids are of another life. Incarnation 0 is not checked."""
        if incarnation not in (0, self.incarnation):
            raise Aborted(
                Reason.INCARNATION_CHANGED,
                "the block ids are of another life of this engine and name other blocks now: allocate again",
            )

    def raise_generation(self) -> None:
        """Raises the generation after the memory was registered again."""
        self.description = replace(self.engine, memory_generation=self.engine.memory_generation + 1)


NOT_THE_ENGINE = (
    "the pool belongs to the engine that is attached: it names its blocks by its session, or by a call that shows its "
    "ticket"
)


class PoolTables:
    """The blocks of one life."""

    def __init__(self, life: EngineLife, ledger: Ledger) -> None:
        self._life, self._limits = life, ledger.limits
        pool = life.description.pool if life.description else None
        ranks = life.description.stage_ranks if life.description else 0
        self._block_bytes = [ranks * nbytes for nbytes, _ in pool.block_sizes] if pool else []
        """Bytes of a block of each group, over all ranks."""
        sizes = tuple(group.blocks for group in pool.groups) if pool else ()
        self.pins = PinTable(sizes, pool.spaces if pool else ())
        self.allocator = Allocator(sizes, self.pins, ledger)
        self.steps = RankSteps(life.description)
        self.proofs = Proofs()
        self.rekeying = ""
        """Reason why the ranks' data paths are about to begin again. Empty otherwise."""

    @property
    def owner(self) -> str:
        """Owner of the pool's blocks and scheduling. A pool whose blocks the server gives out belongs to everyone."""
        life = self._life
        return ENGINE if life.attached and life.engine.pool_kind is PoolKind.ENGINE_MANAGED else EVERYONE

    def check_owner(self, caller: str, verb: Verb) -> None:
        """Raises PermissionDenied (NOT_OWNER) for a caller that does not speak for the engine that owns the pool."""
        if not may(caller, verb, Thing(ThingKind.POOL, self.owner)):
            raise PermissionDenied(Reason.NOT_OWNER, NOT_THE_ENGINE)

    def check_owned(self, blocks: Blocks, allocation_id: str, caller: str) -> None:
        """Raises PreconditionFailed (BLOCK_NOT_ALLOCATED) in a server-managed pool for blocks that are not the caller's
        or not of the stated allocation. Raises in an engine-managed pool PermissionDenied (NOT_OWNER) for blocks that
        the engine does not name, and PreconditionFailed (POOL_KIND_MISMATCH) for a stated allocation.
        """
        if self._life.engine.pool_kind is PoolKind.SERVER_MANAGED:
            self.allocator.check_usable(blocks, allocation_id, caller)
            return
        if any(map(len, blocks)) and not may(caller, Verb.USE, Thing(ThingKind.BLOCKS, self.owner)):
            raise PermissionDenied(Reason.NOT_OWNER, NOT_THE_ENGINE)
        if allocation_id:
            raise PreconditionFailed(
                Reason.POOL_KIND_MISMATCH, "the engine's own block manager gives out these blocks: state no allocation"
            )

    def check_open(self) -> None:
        """Raises PreconditionFailed (DRAINING) or Exhausted (QUARANTINED) while no new work is accepted."""
        if self._life.draining:
            raise _drains()
        self.check_steady()
        if any(self.pins.quarantined) and (why := self.quarantine_full()):
            raise Exhausted(Reason.QUARANTINED, why, retry_delay_s=1.0)

    def check_taking(self) -> None:
        """Raises PreconditionFailed (DRAINING) while this server drains."""
        if self._life.draining:
            raise _drains()

    def check_steady(self) -> None:
        """Raises Exhausted (QUARANTINED) while the memory is being registered again."""
        if self.rekeying:
            busy = f"this engine's memory is being registered again: {self.rekeying}"
            raise Exhausted(Reason.QUARANTINED, busy, retry_delay_s=1.0)

    def quarantine_full(self) -> str:
        """Returns text that names a group with too many blocks in quarantine, or ""."""
        for group, space in enumerate(self.pins.spaces):
            count = self.pins.quarantined[space]
            if count and count > self._limits.quarantine_share * (
                blocks := self._life.engine.pool.groups[group].blocks
            ):
                return (
                    f"{count} of {blocks} blocks of group {group} are in quarantine: ListPins says what would prove "
                    "them at rest; ReleaseQuarantine, if that does not come"
                )
        return ""

    def resolve(self, lists: BlockLists, field: str, rows: str = "groups") -> Blocks:
        """Returns block ids checked against the pool: one array for each group, empty where none is listed. `rows` is
        the field's name for the lists.

        Raises OutOfRange or InvalidRequest.
        """
        pool = self._life.engine.pool
        groups = pool.groups
        blocks = [NO_IDS] * len(groups)
        seen = set()
        for row, (group, ids) in enumerate(lists):
            if not 0 <= group < len(groups) or group in seen:
                why = "is listed twice" if group in seen else f"does not exist; the pool has {len(groups)}"
                what = f"group {group} {why}"
                wrong = (FieldViolation(f"{field}.{rows}[{row}].group", what),)
                raise InvalidRequest(Reason.GROUP_MISMATCH, what, violations=wrong)
            seen.add(group)
            check_ids(ids, groups[group].blocks, f"{field}.{rows}[{row}]", group=group)
            blocks[group] = ids
        check_spaces(blocks, pool, field)
        total, most = sum(map(len, blocks)), self._limits.blocks_per_request
        if total > most:
            raise too_many(f"{total} blocks in one request; the limit is {most}", most, field, "blocks")
        return tuple(blocks)

    def bytes_of(self, counts: Sequence[int]) -> int:
        """Returns the bytes of these block counts by group, over all ranks."""
        total = 0
        for count, nbytes in zip(counts, self._block_bytes, strict=True):
            total += count * nbytes
        return total


class RankSteps:
    """The last engine step that each rank has finished, in each layer of its pipeline stage."""

    def __init__(self, engine: EngineDescription | None) -> None:
        self._engine = engine
        self._steps: dict[int, dict[int, int]] = {}
        """Rank -> layer -> last finished step, for ranks that have reported."""
        self._whole = [0] * (engine.world_size if engine is not None else 0)
        """Last step that each rank has finished in all its layers."""
        self._layers: dict[int, list[int]] = {}
        """Layers of each pipeline stage that was looked up."""

    def finish(self, rank: int, step: int, layers: LayerRange | None) -> None:
        """Records that a rank finished all work up to `step`, or with `layers` only that of those layers."""
        mine = self._steps.setdefault(rank, {})
        for layer in self._within(rank, layers):
            mine[layer] = max(mine.get(layer, 0), step)
        if len(mine) == len(self._within(rank, None)):
            self._whole[rank] = min(mine.values())

    def done(self, layers: LayerRange | None = None) -> int:
        """Returns the last step that every rank has finished in all its layers, or in its layers among `layers`."""
        if layers is None:
            return min(self._whole, default=0)
        ranks = range(len(self._whole))
        return min(
            (self._steps.get(rank, {}).get(layer, 0) for rank in ranks for layer in self._within(rank, layers)),
            default=0,
        )

    def _within(self, rank: int, layers: LayerRange | None) -> list[int]:
        """Returns a rank's layers, or those among `layers`."""
        assert self._engine is not None, "only a pool has ranks"
        stage = rank // self._engine.stage_ranks
        if stage not in self._layers:
            self._layers[stage] = self._engine.pool.stage_layers(stage)
        mine = self._layers[stage]
        return mine if layers is None else [layer for layer in mine if layers[0] <= layer < sum(layers)]


def _drains() -> PreconditionFailed:
    return PreconditionFailed(Reason.DRAINING, "this server drains and takes no new work: choose another engine")
