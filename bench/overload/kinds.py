"""The kinds of calls of the greedy caller, all of them valid, with their shares."""

from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from bench.overload.flood import MARK
from bench.stages.calls import content
from kvgrpc.v1 import admin_pb2, common_pb2, handoff_pb2, lease_pb2, pool_pb2, transfer_pb2
from kvgrpc.v1.handoff_pb2_grpc import HandoffServiceStub
from kvgrpc.v1.lease_pb2_grpc import LeaseServiceStub
from kvgrpc.v1.pool_pb2_grpc import PoolServiceStub

CALL_S = 30.0
LEASES = 32
SHORT = Duration(seconds=2)
LONG = Duration(seconds=3_000)


@dataclass(frozen=True)
class Kind:
    """One kind of call. `share` is per cent of all calls. A call that `lasts` is a stream, which its caller ends."""

    path: str
    body: bytes
    share: int
    lasts: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"path": self.path, "body": self.body.hex(), "share": self.share, "lasts": self.lasts}


async def prepare(
    source: str, destination: str, blocks: int, credentials: grpc.ChannelCredentials | None
) -> tuple[Kind, ...]:
    """Makes what the calls name, at a lead whose `destination` they flood, and returns the kinds."""
    async with _channel(source, credentials) as there, _channel(destination, credentials) as here:
        mine, theirs = await _allocated(here, blocks), await _allocated(there, blocks)
        leases = LeaseServiceStub(here)
        lease = lease_pb2.GrantLeaseRequest(blocks=mine, content=content(blocks), ttl=LONG, firm_ttl=LONG)
        ids = [(await leases.GrantLease(lease, timeout=CALL_S)).lease.lease_id for _ in range(LEASES)]
        key = bytes(15) + b"\1"
        held = handoff_pb2.FinishedBlocksRequest(
            transfer_key=key, for_readers=handoff_pb2.HandOver(blocks=mine, content=content(blocks), ttl=LONG)
        )
        sent = await HandoffServiceStub(here).FinishedBlocks(held, timeout=CALL_S)
        lease = lease_pb2.GrantLeaseRequest(blocks=theirs, content=content(blocks), ttl=LONG, firm_ttl=LONG)
        granted = (await LeaseServiceStub(there).GrantLease(lease, timeout=CALL_S)).grant
    job = handoff_pb2.HandOver(blocks=mine, content=content(blocks), ttl=SHORT, firm_ttl=SHORT)
    refs = [lease_pb2.LeaseRef(lease_id=id_) for id_ in ids]
    found = handoff_pb2.PullDestination(have_tokens=content(blocks).opaque_tokens)
    rows: tuple[tuple[str, Message, int], ...] = (
        ("TransferService/GetTransfer", transfer_pb2.GetTransferRequest(transfer_id=sent.transfer.transfer_id), 20),
        ("AdminService/GetStatus", admin_pb2.GetStatusRequest(), 10),
        ("TransferService/ListTransfers", transfer_pb2.ListTransfersRequest(page_size=10), 10),
        ("LeaseService/RenewLeases", lease_pb2.RenewLeasesRequest(leases=refs), 20),
        ("LeaseService/GetLease", lease_pb2.GetLeaseRequest(lease=refs[0]), 10),
        ("HandoffService/FinishedBlocks", handoff_pb2.FinishedBlocksRequest(transfer_key=MARK, for_readers=job), 15),
        (
            "HandoffService/PullBlocks",
            handoff_pb2.PullBlocksRequest(grant=granted, content=content(blocks), destination=found),
            10,
        ),
    )
    watch = transfer_pb2.WatchTransfersRequest()
    kinds = tuple(Kind(f"/kvgrpc.v1.{name}", request.SerializeToString(), share) for name, request, share in rows)
    lasting = Kind("/kvgrpc.v1.TransferService/WatchTransfers", watch.SerializeToString(), 5, lasts=True)
    return (*kinds, lasting)


def _channel(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(address)
    return grpc.aio.secure_channel(address, credentials)


async def _allocated(channel: grpc.aio.Channel, blocks: int) -> common_pb2.Blocks:
    counts = [pool_pb2.GroupBlockCount(group=0, block_count=blocks)]
    request = pool_pb2.AllocateBlocksRequest(group_block_counts=counts, no_expiry=True)
    return (await PoolServiceStub(channel).AllocateBlocks(request, timeout=CALL_S)).blocks
