"""Calls of TransferService: get, wait for, watch and end transfers."""

from collections.abc import AsyncGenerator, Sequence
from typing import Unpack

from grpc import aio

from kvgrpc.client import options as opt
from kvgrpc.client.caller import Caller, ServerCalls
from kvgrpc.client.transfer_waits import CallerWait
from kvgrpc.client.values import fields
from kvgrpc.client.watch import AnyReply, Cursor, Pace, Watch, WatchEvent, point_of
from kvgrpc.v1 import transfer_pb2
from kvgrpc.v1.common_pb2 import ResponseHeader
from kvgrpc.v1.transfer_pb2_grpc import TransferServiceStub

WAIT_S = 90.0
"""Default timeout of a wait, in seconds: longer than a server's defaults for queue, transfer and settle together."""


class TransferCalls(ServerCalls):
    """A client's methods for transfers."""

    def __init__(self, channel: aio.Channel, caller: Caller) -> None:
        super().__init__(channel, caller)
        self._transfers = TransferServiceStub(channel)

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
