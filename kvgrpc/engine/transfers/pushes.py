"""Handles of the two sides of a push: reserved blocks at the destination, and parts handed over at the source."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvgrpc.core.values import grants
from kvgrpc.engine.transfers.handles import AnyBlocks, Content, Handle, named_blocks, take_back
from kvgrpc.engine.transfers.void_slots import VoidSlots
from kvgrpc.errors import PreconditionFailed, Reason, Unavailable
from kvgrpc.session.v1 import session_pb2
from kvgrpc.v1 import common_pb2, handoff_pb2, lease_pb2
from kvgrpc.wire.values import ON_ABORT, duration

LayerRange = tuple[int, int]
"""A range of layers: (first, count)."""


@dataclass(eq=False, kw_only=True)
class Reservation(Handle):
    """Blocks that a push will fill. They belong to the transfer until Received or BlocksReturned."""

    use_tokens: int = 0
    """Number of tokens, from the start of the prompt, whose KV will be usable."""
    grant: bytes = field(default=b"", repr=False)
    """Token of the WRITE grant, for the source; empty until Reserved."""

    @property
    def kv_transfer_params(self) -> dict[str, Any]:
        """The grant in the JSON form that routers relay. Raises PreconditionFailed before Reserved."""
        if not self.grant:
            raise PreconditionFailed(Reason.GRANT_INVALID, "the lead has not answered yet: wait for Reserved")
        return grants.to_json(self.grant)


@dataclass(eq=False, kw_only=True)
class Push(Handle):
    """The source's side of a push, which hands parts over while prefill runs.

    The blocks of every part belong to the transfer until BlocksReturned. A refusal by the lead ends the push: Failed
    says why.
    """

    transfer_key: bytes = field(repr=False)
    content: Content = field(repr=False)
    page: VoidSlots = field(repr=False)
    mint: Callable[[], str] = field(repr=False)
    incarnation: int = field(repr=False)
    """Incarnation that the block ids are of."""
    consumers: int = 1
    on_abort: grants.OnAbort = grants.OnAbort.RELEASE
    priority: int = 0
    firm_ttl_s: float | None = None
    """Time that blocks are kept after the last part if no destination comes, in seconds; None: the lead's default."""
    traceparent: str = ""
    part_epoch: int = 0
    """Number of times that the prefill has started over."""
    lease_id: str = ""
    """Lease of this epoch's parts; empty before the first one."""

    def register(self, grant: bytes) -> None:
        """Registers the destination, unless its lead or a router does so. At any time; once.

        Raises InvalidRequest (GRANT_INVALID) for a token that is no grant.
        """
        grants.read_claims(grant)
        request = handoff_pb2.RegisterPushRequest(grant=common_pb2.Grant(token=grant), request_id=self.request_id)
        self._ask(register_push=request)

    def finished(
        self, blocks: AnyBlocks, *, layers: LayerRange | None = None, last: bool = False, after_step: int = 0
    ) -> None:
        """Hands one part over: whole blocks that follow those of the same layers handed over before. In a group with a
        window, the first block is the one in which the window of the prompt's end begins. The first part of a prefill
        states the content, which costs each lead time for every token.

        `layers` None: all. `last`: every block of the content is handed over with this part, in all layers; only then
        may the block that holds the prompt's end be partly filled. Only a last part after others may have no blocks.
        """
        own, first = named_blocks(blocks, self.incarnation), not self.lease_id
        self.lease_id = self.lease_id or self.mint()
        part = handoff_pb2.PushPart(
            blocks=own if own.groups else None,
            last=last,
            after_step=after_step,
            priority=self.priority,
            consumer_count=self.consumers,
            on_abort=ON_ABORT[self.on_abort],
            part_epoch=self.part_epoch,
            lease_id=self.lease_id,
        )
        if self.firm_ttl_s is not None:
            part.firm_ttl.CopyFrom(duration(self.firm_ttl_s))
        if layers is not None:
            part.layers.first, part.layers.count = layers
        request = handoff_pb2.FinishedBlocksRequest(
            transfer_key=self.transfer_key, request_id=self.request_id, part=part
        )
        try:
            call = self._ask(finished_blocks=request, void_slot=self.page.take(self.lease_id))
        except Unavailable:  # no lead has the part, so the next one is the first
            if first:
                self.lease_id = ""
            raise
        if first and call is not None:  # copied once, into the frame
            call.finished_blocks.part.content.CopyFrom(self.content.message)

    def expect(self) -> None:
        """Says that the request is known here and parts will come, so that registered destinations wait for them."""
        request = handoff_pb2.FinishedBlocksRequest(transfer_key=self.transfer_key, expected=handoff_pb2.PushExpected())
        self.ask(None, self.traceparent, finished_blocks=request)

    def start_over(self) -> bool:
        """Starts over after a preemption: the parts handed over so far count no more. Then `finished` hands over the
        parts of a new prefill, from its beginning, in whatever blocks; or `fail` says that there will be none.

        Returns True if the old blocks are the engine's own on return. Otherwise they are with PartsReturned, which
        comes after the first part of the new prefill.
        """
        taken_back = not self.lease_id or take_back(self, self.page, self.lease_id)
        self.part_epoch += bool(self.lease_id)
        self.lease_id = ""
        return taken_back

    def fail(self, message: str) -> None:
        """Says that this side cannot deliver: the destination learns it at once."""
        failure = handoff_pb2.SourceFailure(message=message)
        request = handoff_pb2.FinishedBlocksRequest(transfer_key=self.transfer_key, failure=failure)
        self._ask(finished_blocks=request)

    def _ask(self, **request: Any) -> session_pb2.Call | None:
        if self.over:
            raise PreconditionFailed(Reason.TRANSFER_ENDED, "this push is over")
        return None if self.lost else self.ask(self, self.traceparent, **request)


def renewal(address: str, keys: Sequence[bytes], engine_id: str) -> lease_pb2.RenewLeasesRequest:
    """Returns the request by which a lead whose engine waits for these pushes asks their source to keep them."""
    source = common_pb2.PeerAddress(address=address, engine_id=engine_id)
    rows = [lease_pb2.LeaseRef(transfer_key=key) for key in keys]
    return lease_pb2.RenewLeasesRequest(leases=rows, source=source)
