"""Handles of transfers in the scheduler's process, and the content of requests."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.values import grants
from kvgrpc.core.values.block_ids import FEW_IDS, to_runs
from kvgrpc.core.values.content import Item
from kvgrpc.engine.transfers.void_slots import VoidSlots
from kvgrpc.errors import InvalidRequest, OutOfRange, PreconditionFailed, Reason
from kvgrpc.session.v1 import session_pb2
from kvgrpc.v1 import common_pb2, handoff_pb2, transfer_pb2
from kvgrpc.wire.values import packed_field, put_runs

BlockIds: TypeAlias = Sequence[int] | Sequence[Sequence[int]]
"""Block ids of the only group, or one list for each group, in token order. Integer arrays are accepted."""

AnyBlocks: TypeAlias = BlockIds | common_pb2.Blocks
"""Block ids of this life of the engine, or the message of blocks from a reply. The lead checks a message that names an
allocation.
"""

ID_MAX = (1 << 32) - 1
"""Largest block id in messages."""

FEW_TOKENS = 512
"""Number of token ids up to which numpy saves no time."""

IDS_MAX = 1 << 22
"""Maximum number of tokens or blocks in one call: above any request, and few enough for one frame."""


@dataclass(frozen=True)
class Content:
    """The content of KV: token ids with everything else that the KV depends on."""

    message: common_pb2.Content

    @property
    def tokens(self) -> int:
        return len(self.message.tokens.token_ids) or self.message.opaque_tokens


def content(
    token_ids: Sequence[int] = (),
    *,
    adapter: str = "",
    cache_salt: str = "",
    items: Sequence[Item] = (),
    opaque_id: bytes = b"",
    tokens: int = 0,
) -> Content:
    """Returns the content of `token_ids`, which contain the placeholders of multimodal `items`. An engine without token
    ids gives an opaque id for `tokens` tokens. Items beyond the last token do not count.

    Raises InvalidRequest or OutOfRange for invalid token ids, and for an opaque id with anything beside it.
    """
    if opaque_id:
        if len(token_ids) or adapter or cache_salt or items:
            what = "an opaque id stands for all of a content: let it tell adapters, salts and items apart"
            raise InvalidRequest(Reason.INVALID_FIELD, what)
        return Content(common_pb2.Content(opaque_id=opaque_id, opaque_tokens=tokens))
    if len(token_ids) > IDS_MAX:
        raise OutOfRange(Reason.LIMIT_EXCEEDED, f"{len(token_ids)} token ids in one content; at most {IDS_MAX}")
    try:
        value = common_pb2.TokenContent(
            adapter=adapter, cache_salt=cache_salt,
            multimodal_items=[common_pb2.MultimodalItem(**vars(item)) for item in items],
        )  # fmt: skip
        if len(token_ids) > FEW_TOKENS and (numbers := _as_numbers(token_ids)) is not None:
            value.MergeFromString(packed_field(value.TOKEN_IDS_FIELD_NUMBER, numbers))
        else:
            ids: Any = token_ids
            value.token_ids.extend(ids.tolist() if isinstance(ids, np.ndarray) else ids)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(Reason.INVALID_FIELD, f"token ids lie in [0, 2**32): {error}") from error
    return Content(common_pb2.Content(tokens=value))


class AskLead(Protocol):
    """A function that queues a call of an engine, whose answer and events go to `handle`."""

    def __call__(self, handle: "Handle | None", traceparent: str = "", **request: Any) -> session_pb2.Call: ...


@dataclass(eq=False, kw_only=True)
class Handle:
    """One transfer, from the first call about it to its end."""

    ask: AskLead = field(repr=False)
    request_id: str = ""
    transfer_id: str = ""
    """Transfer id; empty until the lead answered."""
    failed: bool = False
    """True once the engine was told, or is about to be, that the transfer failed."""
    over: bool = False
    """True once the engine was told the last event: the lead has nothing of the transfer any more."""
    lost: bool = field(default=False, repr=False)
    """True once the lead that knew the transfer died: it failed, and its blocks come back when proved at rest."""
    later: list[Callable[[], object]] = field(default_factory=list, repr=False)
    """Work that waits for the transfer id."""

    def cancel(self, message: str = "") -> None:
        """Ends the transfer, if it is not over, and tells the other side. A source applies its `on_abort` when a
        destination cancels. Failed and BlocksReturned follow, as for other ends.
        """
        if not self.over and not self.lost:
            self.once_known(lambda: self.ask(None, cancel_transfer=_cancel(self.transfer_id, message)))

    def once_known(self, work: Callable[[], object]) -> None:
        """Does the work now if the lead knows the transfer, otherwise once it does."""
        if self.transfer_id:
            work()
        else:
            self.later.append(work)


@dataclass(eq=False, kw_only=True)
class HandOver(Handle):
    """A hand-over of blocks. Its grant is valid as soon as `finished_blocks` returned."""

    grant: bytes = field(repr=False)
    """Token of the READ grant, for the consumer."""
    lease_id: str
    page: VoidSlots = field(repr=False)

    @property
    def kv_transfer_params(self) -> dict[str, Any]:
        """The grant in the JSON form that routers relay."""
        return grants.to_json(self.grant)

    def take_back(self) -> bool:
        """Takes the blocks back at once, for a preemption: on return they are the engine's own, though they are read.
        Readers are told, and use nothing of them. Failed and BlocksReturned follow.

        Returns False if that is not possible, since the lead is on another host or has no slot left: then cancel, and
        wait for BlocksReturned.
        """
        return take_back(self, self.page, self.lease_id)


@dataclass(eq=False, kw_only=True)
class Pull(Handle):
    """A pull under way."""

    use_tokens: int = 0
    """Number of tokens, from the start of the prompt, whose KV will be usable if the source agrees."""
    incarnation: int = field(repr=False)
    """Incarnation that the block ids are of."""
    unsent: handoff_pb2.PullBlocksRequest | None = field(default=None, repr=False)
    """The request, until it is sent."""
    started: bool = False

    def start(self, blocks: AnyBlocks = (), *, have_tokens: int = 0, after_step: int = 0) -> None:
        """Gives, once, the blocks for the KV: from the first one that is not wholly held, or in which a window begins,
        to the one with the last of `use_tokens`.

        No blocks: everything was found locally, and the source is released. The blocks belong to the transfer until
        Received or BlocksReturned, also if the pull has failed and its engine does not know yet. Blocks that the lead
        refuses end the pull: Failed says why. Raises PreconditionFailed for a pull that has its blocks
        (TRANSFER_EXISTS) or is over (TRANSFER_ENDED), InvalidRequest or OutOfRange for invalid block ids.
        """
        if self.over:
            raise PreconditionFailed(Reason.TRANSFER_ENDED, "this pull is over; pull again")
        if self.started:
            raise PreconditionFailed(Reason.TRANSFER_EXISTS, "this pull has its blocks already")
        own = named_blocks(blocks, self.incarnation)
        destination = handoff_pb2.PullDestination(blocks=own, have_tokens=have_tokens)
        self.started = True
        if self.lost:
            return
        if self.unsent is not None:
            self.unsent.destination.CopyFrom(destination)
            self.unsent.after_step = after_step
        else:
            self.once_known(lambda: self._give(destination, after_step))

    def _give(self, destination: handoff_pb2.PullDestination, after_step: int) -> None:
        request = handoff_pb2.PullBlocksRequest(
            transfer_id=self.transfer_id, destination=destination, after_step=after_step
        )
        self.ask(self, pull_blocks=request)


def take_back(handle: Handle, page: VoidSlots, lease_id: str) -> bool:
    """Sets a lease's void flag, and tells the lead to look. Returns False without a flag, or after the end."""
    if handle.lost:
        return not handle.over  # no lead is left to vouch for them
    if handle.over or not page.void(lease_id):
        return False
    handle.ask(None, voided=session_pb2.VoidedSlots())
    return True


def named_blocks(blocks: AnyBlocks, incarnation: int) -> common_pb2.Blocks:
    """Returns the message that names blocks: as it was given, or made of ids of this life, as runs, one entry for each
    group that has blocks. Raises InvalidRequest or OutOfRange.
    """
    if isinstance(blocks, common_pb2.Blocks):
        return blocks
    groups: Sequence[Any] = [blocks] if len(blocks) and isinstance(blocks[0], Number) else blocks
    if sum(len(ids) for ids in groups) > IDS_MAX:
        raise OutOfRange(Reason.LIMIT_EXCEEDED, f"more than {IDS_MAX} blocks in one call")
    try:
        rows = [common_pb2.GroupBlocks(group=index, runs=_runs(ids)) for index, ids in enumerate(groups) if len(ids)]
    except (TypeError, ValueError) as error:
        raise InvalidRequest(Reason.INVALID_FIELD, f"block ids lie in [0, 2**32): {error}") from error
    return common_pb2.Blocks(incarnation=incarnation, groups=rows)


def _runs(ids: Sequence[int]) -> common_pb2.BlockRuns:
    """Returns ids as maximal runs of consecutive ids. Raises TypeError or ValueError for an invalid id."""
    if len(ids) > FEW_IDS and (numbers := _as_numbers(np.asarray(ids))) is not None:
        runs = common_pb2.BlockRuns()
        put_runs(numbers, runs)
        return runs
    starts, counts = to_runs(ids)
    return common_pb2.BlockRuns(starts=starts, counts=counts)


def _as_numbers(ids: Sequence[int] | NDArray[Any]) -> NDArray[np.int64] | None:
    """Returns an array of valid ids for numpy, or None for other sequences."""
    if not isinstance(ids, array | np.ndarray) or not len(ids):
        return None
    numbers = np.asarray(ids)
    valid = numbers.ndim == 1 and numbers.dtype.kind in "iu" and numbers.min() >= 0 and numbers.max() <= ID_MAX
    return numbers.astype(np.int64, copy=False) if valid else None


def _cancel(transfer_id: str, message: str) -> transfer_pb2.CancelTransferRequest:
    scope = transfer_pb2.CANCEL_SCOPE_ON_ABORT
    return transfer_pb2.CancelTransferRequest(transfer_id=transfer_id, message=message, scope=scope)
