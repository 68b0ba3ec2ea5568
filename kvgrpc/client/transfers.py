"""Calls of a client for transfers: what begins one, waits for it, watches or ends it, and what finds KV to pull."""

import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Unpack

from grpc import aio

from kvgrpc.client import options as opt
from kvgrpc.client.caller import Caller
from kvgrpc.client.transfer_waits import CallerWait
from kvgrpc.client.values import (
    AnyBlocks,
    Tokens,
    as_blocks,
    as_content,
    call_options,
    fields,
    other_fields,
    own_blocks,
)
from kvgrpc.client.watch import AnyReply, Cursor, Pace, Watch, WatchEvent, point_of
from kvgrpc.client.watch_engine import OfferEvent, watch_engine
from kvgrpc.v1 import handoff_pb2, lease_pb2, transfer_pb2
from kvgrpc.v1.common_pb2 import Grant, PeerAddress, ResponseHeader
from kvgrpc.v1.handoff_pb2_grpc import HandoffServiceStub
from kvgrpc.v1.lease_pb2_grpc import LeaseServiceStub
from kvgrpc.v1.transfer_pb2_grpc import TransferServiceStub

WAIT_S = 90.0
"""Default timeout of a wait, in seconds: longer than a server's defaults for queue, transfer and settle together."""
_OF_FINISHED = frozenset({"request_id", "transfer_key", "validate_only"})
"""Options of a hand-over or a part that are fields of the request, not of its job."""


class TransferCalls:
    """A client's methods of HandoffService and TransferService, and those of LeaseService about content."""

    def __init__(self, channel: aio.Channel, caller: Caller) -> None:
        self.channel = channel
        """Channel for RPCs that have no method here: `SomeServiceStub(client.channel)`, with a deadline of your own."""
        self._call = caller
        self._handoff = HandoffServiceStub(channel)
        self._transfers = TransferServiceStub(channel)
        self._leases = LeaseServiceStub(channel)

    # ---- what begins a transfer

    async def finished_blocks(
        self, blocks: AnyBlocks, content: Tokens, **options: Unpack[opt.FinishedBlocksOptions]
    ) -> handoff_pb2.FinishedBlocksResponse:
        """Hands over the finished blocks of a whole prompt: pins them under a lease and mints the READ grant that
        consumers pull with. The caller must not reuse the blocks before the transfer's memory is RETURNED.
        """
        job = handoff_pb2.HandOver(
            content=as_content(content), **own_blocks(blocks, options), **other_fields(options, but=_OF_FINISHED)
        )
        request = handoff_pb2.FinishedBlocksRequest(for_readers=job, **_of_finished(options))
        request.transfer_key = request.transfer_key or secrets.token_bytes(16)
        return await self._call.change(self._handoff.FinishedBlocks, request, call_options(options))

    async def push_part(
        self,
        transfer_key: bytes,
        blocks: AnyBlocks | None = None,
        content: Tokens | None = None,
        **options: Unpack[opt.PushPartOptions],
    ) -> handoff_pb2.FinishedBlocksResponse:
        """Hands over one part of a push as soon as it is written: whole blocks that follow those of the same layers in
        earlier parts. The first part states the `content` of all parts. The final one sets `last`, and may have no
        blocks.
        """
        job = handoff_pb2.PushPart(**other_fields(options, but=_OF_FINISHED))
        if blocks is not None:
            job.blocks.CopyFrom(as_blocks(blocks, options.get("incarnation", 0)))
        if content is not None:
            job.content.CopyFrom(as_content(content))
        request = handoff_pb2.FinishedBlocksRequest(transfer_key=transfer_key, part=job, **_of_finished(options))
        return await self._call.change(self._handoff.FinishedBlocks, request, call_options(options))

    async def source_failed(
        self, transfer_key: bytes, message: str = "", *, request_id: str = "", **options: Unpack[opt.EffectOptions]
    ) -> handoff_pb2.FinishedBlocksResponse:
        """Tells that the source cannot deliver: ends the push under this key at once, at both sides."""
        job = handoff_pb2.SourceFailure(message=message)
        request = handoff_pb2.FinishedBlocksRequest(
            transfer_key=transfer_key, request_id=request_id, failure=job, **fields(options)
        )
        return await self._call.change(self._handoff.FinishedBlocks, request, options)

    async def pull_blocks(
        self,
        pull: Grant | str,
        content: Tokens | None = None,
        *,
        blocks: AnyBlocks | None = None,
        have_tokens: int = 0,
        incarnation: int = 0,
        **options: Unpack[opt.PullBlocksOptions],
    ) -> handoff_pb2.PullBlocksResponse:
        """Pulls what a grant offers, or gives an earlier pull, named by its transfer id, the blocks that it waits for.

        `blocks` None means not known yet. Empty `blocks` mean that all was found locally, which releases the source.
        `have_tokens` counts the tokens whose KV is already here; `incarnation` is the life that bare ids in `blocks`
        belong to. The call returns at once: `wait` and `watch` tell the end, and `pull` waits for it.
        """
        request = _pull_request(pull, content, options)
        if blocks is not None:
            request.destination.CopyFrom(_destination(blocks, have_tokens, incarnation))
        return await self._call.change(self._handoff.PullBlocks, request, options)

    async def pull(
        self,
        pull: Grant | str,
        content: Tokens | None = None,
        *,
        blocks: AnyBlocks,
        returned: bool = False,
        timeout_s: float = WAIT_S,
        **options: Unpack[opt.PullOptions],
    ) -> transfer_pb2.Transfer:
        """Pulls and waits, like `pull_blocks` and then `wait`, in one RPC if the server supports that. Returns the
        transfer once it is over, however it ended. DeadlineExceeded names the transfer's phase and, in `metadata`, its
        `transfer_id`. After it, or if this coroutine is cancelled, the transfer goes on until it ends or `cancel` ends
        it.
        """
        where = [options.pop("have_tokens", 0), options.pop("incarnation", 0)]
        request = _pull_request(pull, content, options)
        request.destination.CopyFrom(_destination(blocks, *where))
        return await self._wait(returned, timeout_s).begun(self._handoff.PullBlocks, request, call_options(options))

    async def reserve_blocks(
        self, transfer_key: bytes, blocks: AnyBlocks, content: Tokens, **options: Unpack[opt.ReserveBlocksOptions]
    ) -> handoff_pb2.ReserveBlocksResponse:
        """Reserves blocks that a push will fill, and mints the WRITE grant for them."""
        request = handoff_pb2.ReserveBlocksRequest(
            transfer_key=transfer_key,
            content=as_content(content),
            **own_blocks(blocks, options),
            **other_fields(options),
        )
        return await self._call.change(self._handoff.ReserveBlocks, request, call_options(options))

    async def receive(
        self,
        transfer_key: bytes,
        blocks: AnyBlocks,
        content: Tokens,
        source: PeerAddress,
        *,
        returned: bool = False,
        timeout_s: float = WAIT_S,
        **options: Unpack[opt.ReceiveOptions],
    ) -> transfer_pb2.Transfer:
        """Reserves and waits, like `reserve_blocks` and then `wait`, in one RPC if the server supports that. The server
        registers the push at its `source`. Returns the transfer once it is over, like `pull`.
        """
        request = handoff_pb2.ReserveBlocksRequest(
            transfer_key=transfer_key,
            content=as_content(content),
            source=source,
            **own_blocks(blocks, options),
            **other_fields(options),
        )
        wait = self._wait(returned, timeout_s)
        return await wait.begun(self._handoff.ReserveBlocks, request, call_options(options))

    async def register_push(
        self, grant: Grant, *, request_id: str = "", **options: Unpack[opt.EffectOptions]
    ) -> handoff_pb2.RegisterPushResponse:
        """Tells the source of a push where to send its blocks."""
        request = handoff_pb2.RegisterPushRequest(grant=grant, request_id=request_id, **fields(options))
        return await self._call.change(self._handoff.RegisterPush, request, options)

    # ---- transfers

    async def get_transfer(
        self, transfer_id: str, **options: Unpack[opt.CallOptions]
    ) -> transfer_pb2.GetTransferResponse:
        """Returns one transfer. NotFound means that its memory counts as QUARANTINED."""
        request = transfer_pb2.GetTransferRequest(transfer_id=transfer_id)
        return await self._call.read(self._transfers.GetTransfer, request, options)

    async def wait(
        self, transfer_id: str, *, returned: bool = False, timeout_s: float = WAIT_S
    ) -> transfer_pb2.Transfer:
        """Returns the transfer once it is over, however it ended: check its state. With `returned`, waits until its
        memory is RETURNED too. The timeout has no bound: the call asks again, also while the server cannot be reached.
        DeadlineExceeded names the transfer's current phase. A silent server can add 5 s to `timeout_s`.
        """
        return await self._wait(returned, timeout_s).one(transfer_id)

    async def wait_transfers(
        self, transfer_ids: Sequence[str], *, returned: bool = False, any_of: bool = False, timeout_s: float = WAIT_S
    ) -> transfer_pb2.WaitTransfersResponse:
        """Waits like `wait` for at most 512 transfers. The reply comes when all, or with `any_of` some, meet the
        condition, or at the timeout; `condition_met` tells which, for the whole and for each. An unknown transfer is a
        row without a transfer and counts as met.
        """
        return await self._wait(returned, timeout_s).many(transfer_ids, any_of)

    async def list_transfers(self, **options: Unpack[opt.ListTransfersOptions]) -> transfer_pb2.ListTransfersResponse:
        """Returns the transfers that match, newest first. A watch after this reply misses nothing."""
        call: dict[str, object] = {name: options.pop(name) for name in ("limit", "timeout_s") if name in options}
        request = transfer_pb2.ListTransfersRequest(filter=transfer_pb2.TransferFilter(**fields(options)))
        return await self._call.pages(self._transfers.ListTransfers, request, call, "transfers")

    def watch(
        self,
        *,
        after: AnyReply | ResponseHeader | None = None,
        pace: Pace | None = None,
        **which: Unpack[opt.WhichTransfers],
    ) -> AsyncGenerator[WatchEvent, None]:
        """Yields every change of the transfers that match, from now on, or after an earlier reply, for example that of
        `pull_blocks` or `list_transfers`. The watch survives lost connections and restarts. After `HistoryLost` or
        `IncarnationChanged`, list the transfers again.
        """
        cursor = Cursor(transfer_pb2.TransferFilter(**fields(which)), *point_of(after))
        return Watch(self._call, self._transfers.WatchTransfers, cursor, pace or Pace()).events()

    async def acknowledge(
        self, transfer_ids: Sequence[str], **options: Unpack[opt.EffectOptions]
    ) -> transfer_pb2.AcknowledgeTransfersResponse:
        """Tells the server that the owning engine has seen the end of these transfers and the return of their
        memory.
        """
        request = transfer_pb2.AcknowledgeTransfersRequest(transfer_ids=transfer_ids, **fields(options))
        return await self._call.change(self._transfers.AcknowledgeTransfers, request, options)

    async def cancel(
        self, transfer: str | bytes, *, message: str = "", **options: Unpack[opt.CancelOptions]
    ) -> transfer_pb2.CancelTransferResponse:
        """Ends a transfer by its id, or (bytes) all with this transfer key. Under an unknown key, later transfers are
        refused. The other side is told and ends CANCELLED too, unless `scope` is THIS_SIDE. `free_allocation_ids` frees
        the request's allocations here in the same call. `clean_up` does this at several servers.
        """
        request = transfer_pb2.CancelTransferRequest(message=message, **fields(options))
        if isinstance(transfer, bytes):
            request.transfer_key = transfer
        else:
            request.transfer_id = transfer
        return await self._call.change(self._transfers.CancelTransfer, request, options)

    def _wait(self, returned: bool, timeout_s: float) -> CallerWait:
        condition = transfer_pb2.WAIT_CONDITION_RETURNED if returned else transfer_pb2.WAIT_CONDITION_ENDED
        return CallerWait(self._call, self._transfers, condition, timeout_s)

    # ---- content

    async def find_offers(
        self, content: Tokens, *, tenant: str = "", **options: Unpack[opt.CallOptions]
    ) -> lease_pb2.FindOffersResponse:
        """Returns the leases that hold the longest beginning of a prompt here, each with a grant: give one to `pull`
        with its `token_count` as `use_tokens`. No offers: nothing of the prompt is found. Only leases that were handed
        over as `findable` are.
        """
        request = lease_pb2.FindOffersRequest(content=as_content(content), tenant=tenant)
        return await self._call.read(self._leases.FindOffers, request, options)

    async def watch_offers(
        self, *, tenant: str = "", after: lease_pb2.WatchOffersResponse | None = None
    ) -> AsyncGenerator[OfferEvent, None]:
        """Yields what can be found at the engine: all of it first, then changes. The watch survives lost connections
        and restarts: a message with `snapshot` replaces what was told before. `EngineUnreachable` marks that the server
        cannot be reached. `after`: the last message of an earlier watch.
        """
        last = after or lease_pb2.WatchOffersResponse()

        def request() -> lease_pb2.WatchOffersRequest:
            life = last.header.incarnation
            return lease_pb2.WatchOffersRequest(tenant=tenant, after_offer_seq=last.offer_seq, incarnation=life)

        async with aclosing(watch_engine(self._call, self._leases.WatchOffers, request)) as events:
            async for event in events:
                last = event if isinstance(event, lease_pb2.WatchOffersResponse) else last
                yield event


def _pull_request(
    pull: Grant | str, content: Tokens | None, options: Mapping[str, Any]
) -> handoff_pb2.PullBlocksRequest:
    request = handoff_pb2.PullBlocksRequest(**fields(options))
    if isinstance(pull, Grant):
        request.grant.CopyFrom(pull)
    elif isinstance(pull, str):
        request.transfer_id = pull
    else:
        raise TypeError(f"pull is a Grant or a transfer id, not {type(pull).__name__}")
    if content is not None:
        request.content.CopyFrom(as_content(content))
    return request


def _destination(blocks: AnyBlocks, have_tokens: int, incarnation: int) -> handoff_pb2.PullDestination:
    return handoff_pb2.PullDestination(blocks=as_blocks(blocks, incarnation), have_tokens=have_tokens)


def _of_finished(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in _OF_FINISHED}
