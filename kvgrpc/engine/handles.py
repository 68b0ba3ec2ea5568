"""Handles of transfers in the scheduler's process, and the content of requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvgrpc.core import grants
from kvgrpc.core.content import UNIT_TOKENS
from kvgrpc.v1 import common_pb2, handoff_pb2

BlockIds = Sequence[int] | Sequence[Sequence[int]]
"""Block ids of the one group, or one list for each group, in token order."""


@dataclass(frozen=True)
class Content:
    """What KV is of: token ids with everything else that it depends on."""

    message: common_pb2.Content

    @property
    def tokens(self) -> int:
        return len(self.message.tokens.token_ids) or self.message.opaque_tokens


def content(
    token_ids: Sequence[int] = (), *, adapter: str = "", cache_salt: str = "", opaque_id: bytes = b"", tokens: int = 0
) -> Content:
    """The content of `token_ids`; or, for an engine that has none, an opaque id for `tokens` tokens."""
    if opaque_id:
        return Content(common_pb2.Content(opaque_id=opaque_id, opaque_tokens=tokens))
    value = common_pb2.TokenContent(token_ids=token_ids, adapter=adapter, cache_salt=cache_salt)
    return Content(common_pb2.Content(tokens=value))


@dataclass(eq=False)
class HandOver:
    """Blocks handed over. The grant is valid as soon as `finished_blocks` returned."""

    grant: bytes
    """The token, for the consumer."""
    lease_id: str
    request_id: str
    transfer_id: str = ""
    """Known once the lead answered."""
    over: bool = False

    @property
    def kv_transfer_params(self) -> dict[str, Any]:
        """The grant in the JSON form that routers relay."""
        return grants.to_json(self.grant)


@dataclass(eq=False)
class Pull:
    """A pull under way."""

    request: handoff_pb2.PullBlocksRequest
    send: Callable[[handoff_pb2.PullBlocksRequest, "Pull"], None]
    cancel_: Callable[["Pull", str], None]
    use_tokens: int = 0
    """Tokens of KV that will be usable, from the start of the prompt, if the source agrees."""
    request_id: str = ""
    transfer_id: str = ""
    """Known once the lead answered."""
    sent: bool = False
    over: bool = False
    waiting: list[handoff_pb2.PullBlocksRequest] = field(default_factory=list)

    def start(self, blocks: BlockIds = (), *, have_tokens: int = 0, after_step: int = 0) -> None:
        """Gives the blocks that the KV goes into: from the first that is not wholly held to the one of the last of
        `use_tokens`.

        No blocks says that everything was found locally: the source is released. The blocks belong to the transfer
        until Received or BlocksReturned.
        """
        destination = handoff_pb2.PullDestination(blocks=group_blocks(blocks), have_tokens=have_tokens)
        if not self.sent:
            self.request.destination.CopyFrom(destination)
            self.request.after_step = after_step
            return
        given = handoff_pb2.PullBlocksRequest(
            transfer_id=self.transfer_id, destination=destination, after_step=after_step
        )
        if self.transfer_id:
            self.send(given, self)
        else:
            self.waiting.append(given)

    def cancel(self, message: str = "") -> None:
        """Ends the pull; Failed and BlocksReturned follow."""
        self.cancel_(self, message)


def usable_tokens(own_tokens: int, offer_tokens: int, use_tokens: int) -> int:
    """The K that a pull of `offer_tokens` uses: as asked, else the whole offer, or the own prompt in whole units."""
    return use_tokens or (offer_tokens if offer_tokens <= own_tokens else own_tokens - own_tokens % UNIT_TOKENS)


def group_blocks(blocks: BlockIds) -> list[common_pb2.GroupBlocks]:
    """Block ids as runs, one entry for each group that has blocks."""
    groups: Sequence[Sequence[int]]
    groups = [] if not len(blocks) else [blocks] if isinstance(blocks[0], int) else blocks  # type: ignore[list-item, assignment]
    return [common_pb2.GroupBlocks(group=index, blocks=block_runs(ids)) for index, ids in enumerate(groups) if len(ids)]


def block_runs(ids: Sequence[int]) -> common_pb2.BlockRuns:
    """Ids as maximal runs of consecutive ones."""
    starts: list[int] = []
    counts: list[int] = []
    for block in ids:
        if starts and block == starts[-1] + counts[-1]:
            counts[-1] += 1
        else:
            starts.append(block)
            counts.append(1)
    return common_pb2.BlockRuns(starts=starts, counts=counts)
