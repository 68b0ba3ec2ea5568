"""Calls of HandoffService: hand over, pull, reserve and push blocks."""

import secrets
from collections.abc import Mapping
from typing import Any, Unpack

from grpc import aio

from kvgrpc.client import options as opt
from kvgrpc.client.caller import Caller
from kvgrpc.client.transfers import WAIT_S, TransferCalls
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
from kvgrpc.v1 import handoff_pb2
from kvgrpc.v1.common_pb2 import Grant, PeerAddress
from kvgrpc.v1.handoff_pb2_grpc import HandoffServiceStub
from kvgrpc.v1.transfer_pb2 import Transfer

_OF_FINISHED = frozenset({"request_id", "transfer_key", "validate_only"})
"""Options of a hand-over or a part that are fields of the request, not of its job."""


class HandoffCalls(TransferCalls):
    """A client's methods for hand-overs, and for the transfers that they start."""

    def __init__(self, channel: aio.Channel, caller: Caller) -> None:
        super().__init__(channel, caller)
        self._handoff = HandoffServiceStub(channel)

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
    ) -> Transfer:
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
    ) -> Transfer:
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
