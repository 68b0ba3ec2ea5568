"""A scene for inputs: an engine in the middle of pulls, pushes, leases and accesses, and valid requests about them.

A new scene is made every few hundred inputs. Inputs are always made from the requests of the first scene, so that equal
choices make equal inputs in every scene; `Scene.translated` puts the ids of the current scene into them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from google.protobuf.message import Message

from kvgrpc.peer.v1 import peer_pb2, rank_pb2
from kvgrpc.v1 import (
    admin_pb2,
    calls_pb2,
    common_pb2,
    handoff_pb2,
    handshake_pb2,
    lease_pb2,
    pool_pb2,
    pool_types_pb2,
    scheduler_pb2,
    tensor_pb2,
    transfer_pb2,
)
from tests.fuzz.fleet_requests import fleet_requests
from tests.fuzz.messages import Known
from tests.service.consumer import Consumer, opening
from tests.service.engines import Engine
from tests.service.pushes import finish, register, reserve
from tests.service.values import content, dur, for_readers, group, ids_of, named_blocks, new_key, prompt, push_part

TOKENS = prompt(40)
WHOLE = content(TOKENS)
OPAQUE = common_pb2.Content(opaque_id=b"prompt", opaque_tokens=40)

Request = tuple[str, Message]
"""The name of an RPC, and a request that succeeds."""


@dataclass
class Scene:
    """An engine, its peer, and a consumer that is neither."""

    engine: Engine
    peer: Engine
    known: Known = field(default_factory=Known)
    requests: dict[str, list[Message]] = field(default_factory=dict)
    """Valid requests, by RPC."""
    consumer: Consumer = field(init=False)
    """A consumer that has made a handshake with the engine. It acts only when the scene or an input makes it."""
    _pushed: tuple[list[int], str] | None = None
    names: list[Any] = field(default_factory=list)
    """Ids, keys and tokens, in the same order in every scene."""

    def __post_init__(self) -> None:
        engine, peer = self.engine, self.peer
        consumer = self.consumer = Consumer(engine)
        blocks, keys = engine.allocate(16), [new_key() for _ in range(6)]
        offer = peer.hand_over(TOKENS, on_abort=common_pb2.ON_ABORT_KEEP, consumer_count=9)
        handed = engine.hand_over(TOKENS, blocks[:3], transfer_key=keys[0], on_abort=common_pb2.ON_ABORT_KEEP)
        lease = engine.api.leases.GrantLease(
            lease_pb2.GrantLeaseRequest(blocks=engine.blocks(blocks[3:6]), content=content(TOKENS), labels={"a": "b"})
        )
        pulled = engine.pull(offer.grant, TOKENS, None)
        reserved = reserve(engine, keys[1], TOKENS, blocks[6:9], content=OPAQUE)
        theirs = reserve(peer, keys[2], TOKENS, peer.allocate(3))
        pushed = register(engine, theirs.grant)
        finish(engine, keys[2], TOKENS, blocks[9:10], last=False)
        allocation = engine.api.pool.AllocateBlocks(
            pool_pb2.AllocateBlocksRequest(group_block_counts=[pool_pb2.GroupBlockCount(block_count=1)], ttl=dur(60))
        )
        engine._allocated.update(ids_of(allocation.blocks))
        greeted = consumer.handshake()
        opened = consumer.open(handed.grant, TOKENS, keys[3])
        for reply in (offer, handed, lease, pulled, reserved, theirs, pushed, allocation, greeted, opened):
            self.known.harvest(reply)
        self.names = [
            *keys,
            *(row.grant.token for row in (offer, handed, lease, reserved, theirs)),
            *(row.lease.lease_id for row in (offer, handed, lease)),
            *(row.transfer.transfer_id for row in (offer, handed, reserved, theirs, pushed)),
            pulled.transfer_id,
            allocation.blocks.allocation_id,
            consumer.engine.engine_id,
            consumer.engine.incarnation,
        ]
        made = _Made(peer, consumer, blocks, keys, offer, handed, lease, pulled, reserved, theirs, allocation)
        for rpc, request in _requests(made):
            self.requests.setdefault(rpc, []).append(request)
            self.known.harvest(request)

    def opened_push(self) -> peer_pb2.PartsReadyRequest:
        """Opens a push as the consumer and returns its first part, which the engine waits for. Ends the push before."""
        if self._pushed is None:
            self._pushed = self.engine.allocate(3), ""
        blocks, before = self._pushed
        if before:
            self.engine.cancel(before)
            self.engine.wait(before)
        reserved = reserve(self.engine, key := new_key(), TOKENS, blocks, content=OPAQUE)
        self._pushed = blocks, reserved.transfer.transfer_id
        self.consumer.open_row(
            peer_pb2.AccessOpening(
                access_id=key, token=reserved.grant.token, push_content=OPAQUE, reverse_access_id=new_key()
            )
        )
        part = peer_pb2.ReadyPart(blocks=[group(range(3))], layers=common_pb2.LayerRange(count=1))
        return peer_pb2.PartsReadyRequest(access_id=key, parts=[part])

    def translated(self, message: Message, first: "Scene") -> Message:
        """Replaces the names of the first scene by the names of this one, in place, and returns the message."""
        if self is not first:
            _translate(message, dict(zip(first.names, self.names, strict=True)))
        return message


@dataclass(frozen=True)
class _Made:
    """Things that requests can be about."""

    peer: Engine
    consumer: Consumer
    blocks: list[int]
    """Blocks of the engine; those from index 10 on are in no transfer."""
    keys: list[bytes]
    offer: Any
    handed: Any
    lease: Any
    pulled: Any
    reserved: Any
    theirs: Any
    allocation: Any

    @property
    def free(self) -> common_pb2.Blocks:
        return self.named(self.blocks[10:13])

    def named(self, ids: list[int]) -> common_pb2.Blocks:
        """Returns blocks named in the engine's current life."""
        return named_blocks(self.handed.header.incarnation, group(ids))

    @property
    def destination(self) -> handoff_pb2.PullDestination:
        return handoff_pb2.PullDestination(blocks=self.free)

    @property
    def where(self) -> common_pb2.PeerAddress:
        return common_pb2.PeerAddress(address=self.peer.address)


def _requests(made: _Made) -> Iterator[Request]:
    """Yields (RPC, a request that succeeds) for every RPC of the server. Exceptions: ConnectRank has a wrong
    ticket, and requests of TensorService and FleetService fail only because the pool is no staging store, and because
    there is no registry.
    """
    for of_service in (
        _handshake_requests, _handoff_requests, _scheduler_requests, _transfer_requests, _lease_requests,
        _tensor_requests, _pool_requests, _admin_requests, fleet_requests, _peer_requests,
    ):  # fmt: skip
        yield from of_service(made)


def _handshake_requests(made: _Made) -> Iterator[Request]:
    yield "GetCapabilities", handshake_pb2.GetCapabilitiesRequest()
    endpoints = [pool_types_pb2.RankEndpoint(rank=0)]
    yield (
        "Handshake",
        handshake_pb2.HandshakeRequest(
            engine=made.consumer.engine, endpoints=endpoints, proof=made.consumer.told, proofs=[made.consumer.shows]
        ),
    )
    yield "CheckCompatibility", handshake_pb2.CheckCompatibilityRequest(engine=made.consumer.engine)
    yield "GetEngine", handshake_pb2.GetEngineRequest()
    yield "WatchEngine", handshake_pb2.WatchEngineRequest(min_interval=dur(1))
    yield "ConnectPeer", handshake_pb2.ConnectPeerRequest(peer=made.where)


def _handoff_requests(made: _Made) -> Iterator[Request]:
    yield "FinishedBlocks", for_readers(
        transfer_key=made.keys[4], blocks=made.free, content=WHOLE, consumer_count=2, ttl=dur(30), request_id="r",
        idempotency_key="k-1",
    )  # fmt: skip
    blocks, layers = made.named(made.blocks[13:14]), common_pb2.LayerRange(count=1)
    yield "FinishedBlocks", push_part(transfer_key=made.keys[2], blocks=blocks, content=WHOLE, layers=layers)
    yield (
        "FinishedBlocks",
        handoff_pb2.FinishedBlocksRequest(transfer_key=made.keys[5], failure=handoff_pb2.SourceFailure(message="no")),
    )
    yield (
        "PullBlocks",
        handoff_pb2.PullBlocksRequest(
            grant=made.offer.grant,
            content=WHOLE,
            destination=made.destination,
            queue_timeout=dur(1),
            request_id="r",
        ),
    )
    yield (
        "PullBlocks",
        handoff_pb2.PullBlocksRequest(transfer_id=made.pulled.transfer_id, destination=made.destination),
    )
    yield (
        "ReserveBlocks",
        handoff_pb2.ReserveBlocksRequest(
            transfer_key=made.keys[4], blocks=made.free, content=WHOLE, source=made.where, registration_timeout=dur(5)
        ),
    )
    yield "RegisterPush", handoff_pb2.RegisterPushRequest(grant=made.theirs.grant)


def _transfer_requests(made: _Made) -> Iterator[Request]:
    sent = made.handed.transfer.transfer_id
    get = transfer_pb2.GetTransferRequest(transfer_id=sent)
    yield "GetTransfer", get
    path, body = "kvgrpc.v1.TransferService/GetTransfer", get.SerializeToString()
    calls = [calls_pb2.UnaryCall(call_id=id_, method=path, request=body, timeout=dur(5)) for id_ in (1, 2)]
    yield "StreamCalls", calls_pb2.StreamCallsRequest(calls=calls, cancelled_call_ids=[1])
    yield (
        "WaitTransfer",
        transfer_pb2.WaitTransferRequest(transfer_id=sent, timeout=dur(1e-3), layers=common_pb2.LayerRange(count=1)),
    )
    wanted = transfer_pb2.TransferFilter(
        request_id="r", trace_id="0" * 32, states=[transfer_pb2.TRANSFER_STATE_ACTIVE], min_age=dur(1),
        memory_dispositions=[transfer_pb2.MEMORY_DISPOSITION_HELD], peer_engine_id=made.peer.engine_id,
    )  # fmt: skip
    yield "WaitTransfers", transfer_pb2.WaitTransfersRequest(transfer_ids=[sent, "t"], timeout=dur(1e-3))
    yield "ListTransfers", transfer_pb2.ListTransfersRequest(filter=wanted, page_size=5)
    yield (
        "WatchTransfers",
        transfer_pb2.WatchTransfersRequest(
            filter=wanted, after_event_seq=1, incarnation=made.handed.header.incarnation
        ),
    )
    yield "AcknowledgeTransfers", transfer_pb2.AcknowledgeTransfersRequest(transfer_ids=[sent, "t"])
    yield "CancelTransfer", transfer_pb2.CancelTransferRequest(transfer_id=sent, message="no")
    yield "CancelTransfer", transfer_pb2.CancelTransferRequest(transfer_key=made.keys[2])


def _lease_requests(made: _Made) -> Iterator[Request]:
    ref = lease_pb2.LeaseRef(lease_id=made.lease.lease.lease_id)
    other = lease_pb2.LeaseRef(grant=made.handed.grant)
    key, labels = made.keys[4], {"a": "b"}
    granted = lease_pb2.GrantLeaseRequest(
        blocks=made.free, content=WHOLE, ttl=dur(5), consumer_count=2, labels=labels, transfer_key=key, findable=True
    )
    yield "GrantLease", granted
    yield "RenewLeases", lease_pb2.RenewLeasesRequest(leases=[ref, other], ttl=dur(9))
    yield "KeepAlive", lease_pb2.KeepAliveRequest(leases=[ref, other], ttl=dur(9))
    yield "ReleaseLease", lease_pb2.ReleaseLeaseRequest(lease=other)
    yield "GetLease", lease_pb2.GetLeaseRequest(lease=ref)
    yield "ListLeases", lease_pb2.ListLeasesRequest(request_id="r", page_size=3)
    yield "FindOffers", lease_pb2.FindOffersRequest(content=WHOLE, tenant="red")
    yield "WatchOffers", lease_pb2.WatchOffersRequest(tenant="red")


def _pool_requests(made: _Made) -> Iterator[Request]:
    yield "DescribePools", pool_pb2.DescribePoolsRequest()
    yield (
        "AllocateBlocks",
        pool_pb2.AllocateBlocksRequest(group_block_counts=[pool_pb2.GroupBlockCount(block_count=2)], ttl=dur(9)),
    )
    yield (
        "AllocateBlocks",
        pool_pb2.AllocateBlocksRequest(allocation_id=made.allocation.blocks.allocation_id, ttl=dur(9)),
    )
    yield "ReclaimBlocks", pool_pb2.ReclaimBlocksRequest(group_block_counts=[pool_pb2.GroupBlockCount(block_count=2)])
    yield "FreeBlocks", pool_pb2.FreeBlocksRequest(blocks=made.named(made.blocks[14:]))
    yield "GetPoolStatus", pool_pb2.GetPoolStatusRequest()
    yield "ListAllocations", pool_pb2.ListAllocationsRequest(block=made.blocks[0], page_size=3)
    yield (
        "ReadBlocks",
        pool_pb2.ReadBlocksRequest(blocks=made.named(made.blocks[:2]), layers=common_pb2.LayerRange(count=2)),
    )


def _admin_requests(made: _Made) -> Iterator[Request]:
    yield "GetStatus", admin_pb2.GetStatusRequest()
    yield "StartDrain", admin_pb2.StartDrainRequest(reason="the host goes", validate_only=True)
    yield "CancelDrain", admin_pb2.CancelDrainRequest()
    yield "GetDrain", admin_pb2.GetDrainRequest(page_size=3)
    yield "ListPeers", admin_pb2.ListPeersRequest()
    yield "ListPins", admin_pb2.ListPinsRequest(block=admin_pb2.BlockRef(block=made.blocks[0]), page_size=3)
    yield "ReleaseQuarantine", admin_pb2.ReleaseQuarantineRequest()
    yield "ListAuditRecords", admin_pb2.ListAuditRecordsRequest(page_size=3)
    yield "ListSpans", admin_pb2.ListSpansRequest(transfer_id=made.handed.transfer.transfer_id, page_size=3)
    yield "ForgetEngine", admin_pb2.ForgetEngineRequest(engine_id="nobody", message="it is gone")
    sent = made.handed.transfer.transfer_id
    yield (
        "ReleaseQuarantine",
        admin_pb2.ReleaseQuarantineRequest(force=True, message="the host is off", transfer_ids=[sent]),
    )


def _peer_requests(made: _Made) -> Iterator[Request]:
    caller = made.consumer.caller
    openings = [
        opening(made.handed.grant.token, TOKENS, made.keys[5]),
        opening(made.lease.grant.token, TOKENS, made.keys[4]),
    ]
    pushes = peer_pb2.AccessOpening(
        access_id=made.keys[5], token=made.reserved.grant.token, push_content=OPAQUE, reverse_access_id=made.keys[4],
        parts=[peer_pb2.ReadyPart(number=1, blocks=made.free.groups, layers=common_pb2.LayerRange(count=2), last=True)],
    )  # fmt: skip
    closing = peer_pb2.AccessClosing(access_id=made.keys[3], quiesced=True, token=made.handed.grant.token, message="no")
    settling = peer_pb2.AccessSettling(access_id=made.keys[3], last=True, moved_bytes=1, part=1)
    sums = peer_pb2.BlocksOfLayers(blocks=[group(made.blocks[:3])], layers=common_pb2.LayerRange(count=2))
    ask = peer_pb2.PostSendRequest(access_id=made.keys[3], epoch=1, sequence=1, offsets=[0], nbytes=[64])
    parts_ready = peer_pb2.PartsReadyRequest(access_id=made.keys[5], parts=pushes.parts)
    said = [
        peer_pb2.PeerCall(call_id=1, open_access=peer_pb2.OpenAccessRequest(openings=[*openings, pushes])),
        peer_pb2.PeerCall(call_id=2, settle_access=peer_pb2.SettleAccessRequest(settlings=[settling])),
        peer_pb2.PeerCall(call_id=3, close_access=peer_pb2.CloseAccessRequest(closings=[closing])),
        peer_pb2.PeerCall(call_id=4, parts_ready=parts_ready),
        peer_pb2.PeerCall(
            call_id=5,
            checksum_blocks=peer_pb2.ChecksumBlocksRequest(access_id=made.keys[3], blocks=[sums]),
            timeout=dur(5),
        ),
        peer_pb2.PeerCall(call_id=6, post_send=ask),
    ]
    for calls in (said, *([call] for call in said)):
        yield "Converse", peer_pb2.ConverseRequest(calls=calls, caller=caller)
    yield "KeepLiveness", peer_pb2.KeepLivenessRequest(caller=caller)
    yield "ConnectRank", rank_pb2.ConnectRankRequest(ticket=made.keys[0] * 2, rank=1, returns=True, not_at_rest="no")


def _tensor_requests(made: _Made) -> Iterator[Request]:
    name, pb = tensor_pb2.TensorName(transfer_key=made.keys[4], name="layers.0.k", part=1), tensor_pb2
    what: dict[str, Any] = {"dtype": "bfloat16", "shape_sizes": [2, 3], "layer": 1, "content_digest": b"prompt"}
    put: dict[str, Any] = {"tensor": name, "description": pb.TensorDescription(**what, nbytes=12), "ttl": dur(30)}
    id_, soon = made.allocation.blocks.allocation_id, dur(0.01)
    yield "PutTensor", pb.PutTensorRequest(**put, allocation_id=id_, consumers=[made.where], timeout=soon)
    yield "PutTensor", pb.PutTensorRequest(**put, grant=made.offer.grant, request_id="r")
    expected = pb.ExpectedTensor(**what)
    yield "GetTensor", pb.GetTensorRequest(tensor=name, expected=expected, source=made.where, timeout=soon)
    yield "ReleaseTensors", pb.ReleaseTensorsRequest(transfer_key=made.keys[4], names=[name])
    yield "ListTensors", pb.ListTensorsRequest(transfer_key=made.keys[4], states=[pb.TENSOR_STATE_HELD], page_size=3)
    yield "GetStagingStatus", pb.GetStagingStatusRequest()


def _scheduler_requests(made: _Made) -> Iterator[Request]:
    named: dict[str, Any] = {"request_id": "r"}
    table: dict[str, Any] = {**named, "blocks": made.free, "computed_tokens": 16}
    push = common_pb2.Intent(
        transfer_key=made.keys[4], mode=common_pb2.TRANSFER_MODE_PUSH, consumer_count=2, ttl=dur(30)
    )
    push.peer.address = made.peer.address
    calls: dict[str, list[Message]] = {
        "request_arrived": [
            scheduler_pb2.RequestArrivedRequest(**named, prompt=WHOLE, offer=made.offer.grant),
            scheduler_pb2.RequestArrivedRequest(**named, prompt=WHOLE, push=scheduler_pb2.PushOffer(), intent=push),
            scheduler_pb2.RequestArrivedRequest(**named, prompt=WHOLE, give=scheduler_pb2.KvGift(), intent=push),
            scheduler_pb2.RequestArrivedRequest(
                **named, prompt=WHOLE, give=scheduler_pb2.KvGift(mode=common_pb2.TRANSFER_MODE_PUSH),
                target=made.theirs.grant, intent=common_pb2.Intent(transfer_key=made.keys[2]),
            ),
        ],
        "match_tokens": [scheduler_pb2.MatchTokensRequest(**named, computed_tokens=16)],
        "blocks_allocated": [
            scheduler_pb2.BlocksAllocatedRequest(**table, external_tokens=len(TOKENS) - 16),
            scheduler_pb2.BlocksAllocatedRequest(**table),
        ],
        "tokens_computed": [scheduler_pb2.TokensComputedRequest(**table)],
        "blocks_loaded": [scheduler_pb2.BlocksLoadedRequest(**named)],
        "request_preempted": [scheduler_pb2.RequestPreemptedRequest(**named)],
        "request_finished": [
            scheduler_pb2.RequestFinishedRequest(**table, outcome=outcome, content=WHOLE)
            for outcome in (scheduler_pb2.REQUEST_OUTCOME_COMPLETE, scheduler_pb2.REQUEST_OUTCOME_ABORTED)
        ],
        "blocks_needed": [
            scheduler_pb2.BlocksNeededRequest(group_block_counts=[pool_pb2.GroupBlockCount(block_count=1)])
        ],
        "abort_request": [scheduler_pb2.AbortRequestRequest(**named, message="no")],
    }  # fmt: skip
    each = [(kind, row) for kind, rows in calls.items() for row in rows]
    for kind, row in each:
        yield "".join(word.capitalize() for word in kind.split("_")), row
    yield "PollSchedulerNews", scheduler_pb2.PollSchedulerNewsRequest(after_seq=1, wait=dur(1e-3))
    said = [scheduler_pb2.ScheduleCall(**cast("dict[str, Any]", {kind: row})) for kind, row in each]
    yield "Schedule", scheduler_pb2.ScheduleRequest(calls=said, after_seq=1)
    yield "Schedule", scheduler_pb2.ScheduleRequest(calls=said)


def _translate(message: Message, names: dict[Any, Any]) -> None:
    for one, value in message.ListFields():
        if one.message_type is not None:
            if not one.message_type.GetOptions().map_entry:
                for row in value if one.is_repeated else [value]:
                    _translate(row, names)
        elif one.is_repeated:
            value[:] = [names.get(row, row) for row in value]
        elif value in names and not isinstance(value, bool):
            setattr(message, one.name, names[value])
