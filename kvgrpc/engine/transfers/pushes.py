"""Handles of the two sides of a push: blocks that are reserved for one, and the parts that are handed over to one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvgrpc.core.values import grants
from kvgrpc.engine.transfers.handles import AnyBlocks, Content, Handle, named_blocks, take_back
from kvgrpc.engine.transfers.void_page import VoidPage
from kvgrpc.errors import PreconditionFailed, Reason
from kvgrpc.v1 import common_pb2, handoff_pb2, lease_pb2
from kvgrpc.wire.values import ON_ABORT, duration

LayerRange = tuple[int, int]
"""(first, count) of layers."""


@dataclass(eq=False, kw_only=True)
class Reservation(Handle):
    """Blocks that a push will fill. They belong to the transfer until Received or BlocksReturned."""

    use_tokens: int = 0
    """Tokens of KV that will be usable, from the start of the prompt."""
    grant: bytes = field(default=b"", repr=False)
    """The WRITE grant's token, for the source; empty until Reserved."""

    @property
    def kv_transfer_params(self) -> dict[str, Any]:
        """The grant in the JSON form that routers relay. Raises PreconditionFailed before Reserved."""
        if not self.grant:
            raise PreconditionFailed(Reason.GRANT_INVALID, "the lead has not answered yet: wait for Reserved")
        return grants.to_json(self.grant)


@dataclass(eq=False, kw_only=True)
class Push(Handle):
    """What is handed over to the destination of a push, part by part, while prefill runs.

    The blocks of every part belong to the transfer until BlocksReturned. What the lead refuses ends the push: Failed
    says why.
    """

    transfer_key: bytes = field(repr=False)
    content: Content = field(repr=False)
    page: VoidPage = field(repr=False)
    mint: Callable[[], str] = field(repr=False)
    incarnation: int = field(repr=False)
    """The life that its block ids are of."""
    consumers: int = 1
    on_abort: grants.OnAbort = grants.OnAbort.RELEASE
    priority: int = 0
    firm_ttl_s: float | None = None
    """How long its blocks are kept after the last part though no destination has come; None: the lead's default."""
    traceparent: str = ""
    part_epoch: int = 0
    """How often the prefill has started over."""
    lease_id: str = ""
    """The lease of this epoch's parts; empty before the first."""

    def register(self, grant: bytes) -> None:
        """Where the blocks go, if the destination's lead or a router does not say so by itself. At any time; once.

        Raises InvalidRequest (GRANT_INVALID) for what is no grant.
        """
        grants.read_claims(grant)
        request = handoff_pb2.RegisterPushRequest(grant=common_pb2.Grant(token=grant), request_id=self.request_id)
        self._ask(register_push=request)

    def finished(
        self, blocks: AnyBlocks, *, layers: LayerRange | None = None, last: bool = False, after_step: int = 0
    ) -> None:
        """Hands one part over: whole blocks that follow those of the same layers handed over before. Of a window the
        first one is that in which it begins at the prompt's end.

        `layers` None: all. `last`: with it every block of the content was handed over, in all layers; only then may
        the block that holds the prompt's end be partly filled. Without blocks only as the last one after others.
        """
        self.lease_id = self.lease_id or self.mint()
        own = named_blocks(blocks, self.incarnation)
        part = handoff_pb2.PushPart(
            blocks=own if own.groups else None,
            content=self.content.message,
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
        self._ask(finished_blocks=request, void_slot=self.page.take(self.lease_id))

    def expect(self) -> None:
        """Its request is known here, and parts will come: destinations that have registered for it wait for them."""
        request = handoff_pb2.FinishedBlocksRequest(transfer_key=self.transfer_key, expected=handoff_pb2.PushExpected())
        self.ask(None, self.traceparent, finished_blocks=request)

    def start_over(self) -> bool:
        """The prefill was preempted: the parts handed over so far count no more. `finished` hands over those of a new
        prefill, from its beginning, in whatever blocks; or `fail` says that there will be none.

        True: the old blocks are the engine's own from the return on. False: they are with PartsReturned, which comes
        after the first part of the new prefill.
        """
        taken_back = not self.lease_id or take_back(self, self.page, self.lease_id)
        self.part_epoch += bool(self.lease_id)
        self.lease_id = ""
        return taken_back

    def fail(self, message: str) -> None:
        """This side cannot deliver: the destination learns it at once."""
        failure = handoff_pb2.SourceFailure(message=message)
        request = handoff_pb2.FinishedBlocksRequest(transfer_key=self.transfer_key, failure=failure)
        self._ask(finished_blocks=request)

    def _ask(self, **request: Any) -> None:
        if self.over:
            raise PreconditionFailed(Reason.TRANSFER_ENDED, "this push is over")
        if not self.lost:
            self.ask(self, self.traceparent, **request)


def renewal(address: str, keys: Sequence[bytes], engine_id: str) -> lease_pb2.RenewLeasesRequest:
    """What has the lead of the requests that wait for these pushes ask their source to keep them."""
    source = common_pb2.PeerAddress(address=address, engine_id=engine_id)
    rows = [lease_pb2.LeaseRef(transfer_key=key) for key in keys]
    return lease_pb2.RenewLeasesRequest(leases=rows, source=source)
