"""Requests of a store to the node: pages, hand-overs, pulls and their ends, as any caller asks for blocks."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvgrpc.core import actions, events
from kvgrpc.core.actions import Reply
from kvgrpc.core.tables.transfers import Failure, State, Transfer
from kvgrpc.core.tensors.descriptions import Put, content_of
from kvgrpc.core.tensors.rows import TensorOffer
from kvgrpc.core.values.block_ids import Ids
from kvgrpc.core.values.ids import ACCESS_ID_BYTES
from kvgrpc.core.values.owners import STORE
from kvgrpc.errors import (
    Aborted,
    DataLoss,
    DeadlineExceeded,
    Exhausted,
    InternalError,
    InvalidRequest,
    KVGrpcError,
    NotFound,
    PermissionDenied,
    PreconditionFailed,
    Reason,
    Unavailable,
)
from kvgrpc.service.callers import payer
from kvgrpc.service.lead import Lead
from kvgrpc.service.places import CONNECTION

KEY_BYTES = 32
_BY_REASON: dict[Reason, type[KVGrpcError]] = {
    Reason.GRANT_INVALID: InvalidRequest,
    Reason.GRANT_FOREIGN: PermissionDenied,
    Reason.DIAL_REFUSED: PermissionDenied,
    Reason.TRANSFER_KEY_MISMATCH: PermissionDenied,
    Reason.INCARNATION_CHANGED: Aborted,
    Reason.PEER_UNREACHABLE: Unavailable,
    Reason.PEER_LOST: Unavailable,
    Reason.ENGINE_LOST: Unavailable,
    Reason.QUEUE_TIMEOUT: DeadlineExceeded,
    Reason.TRANSFER_TIMEOUT: DeadlineExceeded,
    Reason.SETTLE_TIMEOUT: DeadlineExceeded,
    Reason.CHECKSUM_MISMATCH: DataLoss,
    Reason.QUEUE_FULL: Exhausted,
    Reason.QUARANTINED: Exhausted,
    Reason.POOL_EXHAUSTED: Exhausted,
    Reason.DATA_PATH_FAILED: InternalError,
    Reason.INTERNAL: InternalError,
    Reason.INTERNAL_DEFECT: InternalError,
}
"""Error classes of a transfer's failure. Other reasons give PreconditionFailed: the moment or the pair is wrong."""


def error_of(failure: Failure | None) -> KVGrpcError:
    """Returns a transfer's failure as the error of the waiting call."""
    if failure is None:
        return InternalError(Reason.INTERNAL, "the transfer ended without saying why")
    kind = _BY_REASON.get(failure.reason, PreconditionFailed)
    phase = {"phase": failure.phase} if failure.phase else {}
    return kind(failure.reason, failure.message, metadata=phase)


class StoreTransfers:
    """The store's calls to the node. Each is answered before it returns: none is made while the node is busy."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead

    def allocate(self, pages: int, trace: str) -> tuple[str, Ids]:
        """Allocates `pages` pages. Raises Exhausted (POOL_EXHAUSTED), and refusals of new work."""
        call = self._call(trace)
        answer: actions.Allocated = self._ask(events.AllocateBlocks(call, ((0, pages),), no_expiry=True))
        return answer.allocation_id, answer.blocks[0]

    def free_pages(self) -> int:
        """Returns the number of pages neither given out nor pinned; 0 if the engine is gone."""
        state = self._lead.runner.node.state
        return 0 if state.life.description is None else state.pool.allocator.free_count(0)

    def take_over(self, allocation_id: str, caller: str) -> int:
        """Makes the store the owner of that principal's allocation. Returns the number of its pages. Raises
        NotFound (BLOCK_NOT_ALLOCATED), also for an allocation of another principal.
        """
        answer: actions.Allocated = self._ask(events.GiveAllocation(self._call("", caller), allocation_id, STORE))
        return len(answer.blocks[0])

    def return_to(self, allocation_id: str, caller: str) -> None:
        """Gives the allocation back to that principal, if it still exists."""
        if self._lead.runner.node.state.pool.allocator.known(allocation_id):
            self._ask(events.GiveAllocation(self._call(""), allocation_id, caller))

    def pages_of(self, allocation_id: str) -> Ids:
        """Returns the pages of an allocation, in order. Raises NotFound (BLOCK_NOT_ALLOCATED)."""
        blocks = self._lead.runner.node.state.pool.allocator.find(allocation_id)
        if blocks is None:
            raise NotFound(
                Reason.BLOCK_NOT_ALLOCATED, f"no allocation {allocation_id} here: it was freed, or has ended"
            )
        return blocks[0]

    def free(self, allocation_id: str) -> None:
        """Frees an allocation: its pages come free at their last unpin."""
        if self._lead.runner.node.state.pool.allocator.known(allocation_id):
            self._ask(events.FreeBlocks(self._call(""), allocation_id=allocation_id))

    def hand_over(
        self, offers: Sequence[TensorOffer], put: Put, ttl_s: float, trace: str, *, stands_for: bool = False
    ) -> tuple[bytes, str]:
        """Hands the pages of a tensor, or of a bundle, over to readers. Returns the grant and the transfer's id.
        `stands_for`: each offer has a lease already, and this hand-over stands for them.
        """
        found = [self.find(offer.transfer_id) for offer in offers if stands_for]
        leases = tuple([transfer.lease_id for transfer in found if transfer is not None]) if found else ()
        pages = np.concatenate([self.pages_of(offer.allocation_id) for offer in offers])
        content = content_of(put.tensors, self._lead.weights, len(pages))
        given = os.urandom(KEY_BYTES), ((0, pages),), content, ttl_s, put.consumer_count
        finished = events.FinishedBlocks(
            self._call(trace), *given, request_id=put.request_id, stands_for=leases, tenant=put.tenant
        )
        answer: actions.HandedOver = self._ask(finished)
        assert answer.transfer is not None, "a hand-over to readers is a transfer"
        return answer.token, answer.transfer.id

    def pull(self, pages: Sequence[Ids], put: Put, trace: str) -> str:
        """Begins to pull a tensor, or a bundle, into the pages of each. Returns the transfer's id."""
        whole = np.concatenate(pages)
        content, into = content_of(put.tensors, self._lead.weights, len(whole)), events.Destination(((0, whole),))
        named = put.token, content, os.urandom(ACCESS_ID_BYTES)
        pull = events.PullBlocks(self._call(trace), *named, request_id=put.request_id, destination=into)
        answer: actions.PullStarted = self._ask(pull)
        assert answer.transfer is not None, "a pull is a transfer"
        return answer.transfer.id

    def renew(self, offers: Sequence[TensorOffer]) -> None:
        """Renews the leases of offers that are still kept, for their TTL from now on, up to the cap of leases."""
        by_ttl: dict[float | None, list[events.LeaseRef]] = {}
        for offer in offers:
            transfer = self.find(offer.transfer_id)
            if transfer is not None and not transfer.over:
                by_ttl.setdefault(offer.ttl_s, []).append(events.LeaseRef(transfer.lease_id))
        most = self._lead.runner.node.state.limits.renewals_per_call
        for ttl_s, leases in by_ttl.items():
            for at in range(0, len(leases), most):
                self._ask(events.RenewLeases(self._call(""), tuple(leases[at : at + most]), ttl_s))

    def find(self, transfer_id: str) -> Transfer | None:
        return self._lead.runner.node.state.transfers.find(transfer_id)

    def end(self, transfer_id: str, message: str, scope: events.CancelScope) -> None:
        now = self.find(transfer_id)
        if now is not None and now.state in (State.PENDING, State.ACTIVE):
            call = self._call("")
            event = events.CancelTransfer(call, transfer_id, message=message, scope=scope)
            self._lead.runner.submit(call.id, event, lambda _: None)

    def _call(self, trace: str, principal: str = STORE) -> events.Call:
        number, connection = self._lead.runner.next_call_id(), CONNECTION.get()
        return events.Call(number, principal, trace, connection=connection, on_behalf_of=payer())

    def _ask(self, event: Any) -> Any:
        """Returns the node's answer. Raises its refusal."""
        replies: list[Reply | KVGrpcError] = []
        self._lead.runner.submit(event.call.id, event, replies.append)
        (reply,) = replies
        if isinstance(reply, KVGrpcError):
            raise reply
        return reply.answer
