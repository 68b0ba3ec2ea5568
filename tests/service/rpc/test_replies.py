"""Rules for every reply: the identity of the server, and lists that come in pages."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2

from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import (
    admin_pb2,
    common_pb2,
    handoff_pb2,
    handshake_pb2,
    lease_pb2,
    pool_pb2,
    scheduler_pb2,
    tensor_pb2,
    transfer_pb2,
)
from kvgrpc.wire.accesses import CALLS
from tests.service.api import refused
from tests.service.conftest import SETTINGS, Start
from tests.service.consumer import Consumer
from tests.service.engines import Engine, unchanged
from tests.service.halves import dead, in_rows
from tests.service.services import SERVICES
from tests.service.streamed import streaming
from tests.service.tensors.stores import TENSORS
from tests.service.values import content, dur, new_key, prompt

Calls = Iterator[tuple[str, Any]]


def calls_of_a_push(engine: Engine, peer: Engine, consumer: Consumer) -> Calls:
    """Yields (RPC, reply) of the calls that only a push makes."""
    api, tokens = engine.api, prompt(16)
    target = peer.allocate(1)
    reserved = peer.api.handoff.ReserveBlocks(
        handoff_pb2.ReserveBlocksRequest(transfer_key=new_key(), blocks=peer.blocks(target), content=content(tokens))
    )
    yield "RegisterPush", api.handoff.RegisterPush(handoff_pb2.RegisterPushRequest(grant=reserved.grant))
    opaque = common_pb2.Content(opaque_id=b"prompt", opaque_tokens=16)
    wanted = api.handoff.ReserveBlocks(
        handoff_pb2.ReserveBlocksRequest(
            transfer_key=new_key(), blocks=engine.blocks(engine.allocate(1)), content=opaque
        )
    )
    yield "ReserveBlocks", wanted
    access = new_key()
    consumer.open_row(
        peer_pb2.AccessOpening(
            access_id=access, token=wanted.grant.token, push_content=opaque, reverse_access_id=new_key()
        )
    )
    yield "PartsReady", consumer.ask(peer_pb2.PartsReadyRequest(access_id=access))


def calls_of_a_scheduler(engine: Engine) -> Calls:
    """Yields (RPC, reply) of a scheduler's calls, about a request that moves nothing."""
    stub = engine.api.scheduler
    said: dict[str, Any] = {"request_id": "r"}
    yield "RequestArrived", stub.RequestArrived(scheduler_pb2.RequestArrivedRequest(**said))
    yield "MatchTokens", stub.MatchTokens(scheduler_pb2.MatchTokensRequest(**said))
    yield "BlocksAllocated", stub.BlocksAllocated(scheduler_pb2.BlocksAllocatedRequest(**said))
    yield "TokensComputed", stub.TokensComputed(scheduler_pb2.TokensComputedRequest(**said))
    yield "BlocksLoaded", stub.BlocksLoaded(scheduler_pb2.BlocksLoadedRequest(**said))
    yield "RequestPreempted", stub.RequestPreempted(scheduler_pb2.RequestPreemptedRequest(**said))
    over = scheduler_pb2.RequestFinishedRequest(**said, outcome=scheduler_pb2.REQUEST_OUTCOME_COMPLETE)
    yield "RequestFinished", stub.RequestFinished(over)
    rows = [pool_pb2.GroupBlockCount(group=0, block_count=1)]
    yield "BlocksNeeded", stub.BlocksNeeded(scheduler_pb2.BlocksNeededRequest(group_block_counts=rows))
    yield "AbortRequest", stub.AbortRequest(scheduler_pb2.AbortRequestRequest(**said))
    yield "PollSchedulerNews", stub.PollSchedulerNews(scheduler_pb2.PollSchedulerNewsRequest())
    yield "Schedule", engine.api.step(scheduler_pb2.ScheduleRequest())


def calls_of_a_reader(engine: Engine, consumer: Consumer, handed: handoff_pb2.FinishedBlocksResponse) -> Calls:
    """Yields (RPC, reply) of the calls of a peer that reads what was handed over."""
    api = engine.api
    access = new_key()
    yield "OpenAccess", consumer.open(handed.grant, prompt(16), access)
    yield "ChecksumBlocks", consumer.ask(peer_pb2.ChecksumBlocksRequest(access_id=access))
    yield "PostSend", consumer.ask(peer_pb2.PostSendRequest(epoch=1, values=in_rows(dead(1))))
    yield "SettleAccess", consumer.ask(peer_pb2.SettleAccessRequest())
    yield "CloseAccess", consumer.ask(peer_pb2.CloseAccessRequest())
    yield "KeepLiveness", next(api.peer.KeepLiveness(iter([peer_pb2.KeepLivenessRequest(caller=consumer.caller)])))


def calls_about_transfers(engine: Engine, id_: str) -> Calls:
    """Yields (RPC, reply) of the calls about a transfer. The last one ends it."""
    api = engine.api
    yield "GetTransfer", api.transfers.GetTransfer(transfer_pb2.GetTransferRequest(transfer_id=id_))
    yield (
        "WaitTransfer",
        api.transfers.WaitTransfer(transfer_pb2.WaitTransferRequest(transfer_id=id_, timeout=dur(1e-9))),
    )
    yield "WaitTransfers", api.transfers.WaitTransfers(transfer_pb2.WaitTransfersRequest(transfer_ids=[id_]))
    yield "ListTransfers", api.transfers.ListTransfers(transfer_pb2.ListTransfersRequest())
    yield "WatchTransfers", next(api.transfers.WatchTransfers(transfer_pb2.WatchTransfersRequest(), timeout=10))
    yield "AcknowledgeTransfers", api.transfers.AcknowledgeTransfers(transfer_pb2.AcknowledgeTransfersRequest())
    yield "CancelTransfer", api.transfers.CancelTransfer(transfer_pb2.CancelTransferRequest(transfer_id=id_))


def calls_about_leases(engine: Engine, lease_id: str) -> Calls:
    """Yields (RPC, reply) of the calls about a lease, which the last one ends, and of one that grants another lease."""
    api, ref = engine.api, lease_pb2.LeaseRef(lease_id=lease_id)
    yield (
        "GrantLease",
        api.leases.GrantLease(
            lease_pb2.GrantLeaseRequest(blocks=engine.blocks(engine.allocate(1)), content=content(prompt(16)))
        ),
    )
    yield "RenewLeases", api.leases.RenewLeases(lease_pb2.RenewLeasesRequest(leases=[ref]))
    yield "KeepAlive", next(api.leases.KeepAlive(iter([lease_pb2.KeepAliveRequest(leases=[ref])]), timeout=10))
    yield "GetLease", api.leases.GetLease(lease_pb2.GetLeaseRequest(lease=ref))
    yield "ListLeases", api.leases.ListLeases(lease_pb2.ListLeasesRequest())
    yield "ReleaseLease", api.leases.ReleaseLease(lease_pb2.ReleaseLeaseRequest(lease=ref))


def calls_about_blocks(engine: Engine) -> Calls:
    """Yields (RPC, reply) of the calls about a pool, and of an operator's calls."""
    api = engine.api
    yield "DescribePools", api.pool.DescribePools(pool_pb2.DescribePoolsRequest())
    yield "GetPoolStatus", api.pool.GetPoolStatus(pool_pb2.GetPoolStatusRequest())
    yield "ListAllocations", api.pool.ListAllocations(pool_pb2.ListAllocationsRequest())
    yield (
        "AllocateBlocks",
        api.pool.AllocateBlocks(
            pool_pb2.AllocateBlocksRequest(group_block_counts=[pool_pb2.GroupBlockCount(block_count=1)], ttl=dur(1))
        ),
    )
    rows = [pool_pb2.GroupBlockCount(group=0, block_count=1)]
    yield "ReclaimBlocks", api.pool.ReclaimBlocks(pool_pb2.ReclaimBlocksRequest(group_block_counts=rows))
    yield "ReadBlocks", api.pool.ReadBlocks(pool_pb2.ReadBlocksRequest(blocks=engine.blocks(engine.allocate(1))))
    yield "FreeBlocks", api.pool.FreeBlocks(pool_pb2.FreeBlocksRequest(blocks=engine.blocks(engine.allocate(1))))
    yield "GetStatus", api.admin.GetStatus(admin_pb2.GetStatusRequest())
    yield "StartDrain", api.admin.StartDrain(admin_pb2.StartDrainRequest(validate_only=True))
    yield "CancelDrain", api.admin.CancelDrain(admin_pb2.CancelDrainRequest())
    yield "GetDrain", api.admin.GetDrain(admin_pb2.GetDrainRequest())
    yield "ListPeers", api.admin.ListPeers(admin_pb2.ListPeersRequest())
    yield "ListPins", api.admin.ListPins(admin_pb2.ListPinsRequest())
    yield "ReleaseQuarantine", api.admin.ReleaseQuarantine(admin_pb2.ReleaseQuarantineRequest())
    yield "ListAuditRecords", api.admin.ListAuditRecords(admin_pb2.ListAuditRecordsRequest())
    yield "ListSpans", api.admin.ListSpans(admin_pb2.ListSpansRequest(trace_id="ab" * 16))
    yield "ForgetEngine", api.admin.ForgetEngine(admin_pb2.ForgetEngineRequest(engine_id="nobody"))


def calls_about_tensors(engine: Engine) -> Calls:
    """Yields (RPC, reply) of the calls about a staging store."""
    api, key = engine.api.tensors, new_key()
    name = tensor_pb2.TensorName(transfer_key=key, name="a")
    blocks = engine.api.pool.AllocateBlocks(
        pool_pb2.AllocateBlocksRequest(group_block_counts=[pool_pb2.GroupBlockCount(block_count=1)])
    ).blocks
    what = tensor_pb2.TensorDescription(dtype="uint8", shape_sizes=[9], nbytes=9)
    put = tensor_pb2.PutTensorRequest(tensor=name, description=what, allocation_id=blocks.allocation_id)
    yield "PutTensor", api.PutTensor(put)
    yield "GetTensor", api.GetTensor(tensor_pb2.GetTensorRequest(tensor=name, as_offer=True))
    yield "ListTensors", api.ListTensors(tensor_pb2.ListTensorsRequest())
    yield "GetStagingStatus", api.GetStagingStatus(tensor_pb2.GetStagingStatusRequest())
    yield "ReleaseTensors", api.ReleaseTensors(tensor_pb2.ReleaseTensorsRequest(transfer_key=key))


def one_call_of_each_rpc(engine: Engine, peer: Engine) -> Calls:
    """Yields (RPC, reply) of a successful call of every RPC of the server."""
    api, tokens = engine.api, prompt(16)
    handed = engine.hand_over(tokens)
    offer = peer.hand_over(tokens).grant
    described = api.handshake.GetCapabilities(handshake_pb2.GetCapabilitiesRequest())
    consumer = Consumer(engine)
    yield "FinishedBlocks", handed
    yield "GetCapabilities", described
    yield "GetEngine", api.handshake.GetEngine(handshake_pb2.GetEngineRequest())
    yield "WatchEngine", next(api.handshake.WatchEngine(handshake_pb2.WatchEngineRequest(), timeout=10))
    yield (
        "CheckCompatibility",
        api.handshake.CheckCompatibility(handshake_pb2.CheckCompatibilityRequest(engine=described.engine)),
    )
    yield "Handshake", consumer.handshake()
    yield (
        "ConnectPeer",
        api.handshake.ConnectPeer(handshake_pb2.ConnectPeerRequest(peer=common_pb2.PeerAddress(address=peer.address))),
    )
    yield "PullBlocks", api.handoff.PullBlocks(handoff_pb2.PullBlocksRequest(grant=offer, content=content(tokens)))
    yield from calls_of_a_push(engine, peer, consumer)
    yield from calls_of_a_scheduler(engine)
    yield from calls_of_a_reader(engine, consumer, handed)
    yield from calls_about_leases(engine, handed.lease.lease_id)
    yield from calls_about_transfers(engine, handed.transfer.transfer_id)
    yield from calls_about_blocks(engine)
    with streaming(api) as stream:
        yield "StreamCalls", stream.reply(admin_pb2.GetStatusRequest())


def test_every_reply_says_who_answered_and_in_which_life(start: Start) -> None:
    # The consumer has no liveness stream, and all calls together may take longer than the default grace.
    engine, peer = start(("--data-paths", "shm,collective", "--limit", "peer_grace_s=300"), ())
    (store,) = start((), settings=TENSORS)
    told = [(engine, dict(one_call_of_each_rpc(engine, peer))), (store, dict(calls_about_tensors(store)))]
    # tests/engine/ranks/test_connect_rank.py calls ConnectRank.
    called = {rpc for _, replies in told for rpc in replies}
    rpcs = {m.name for service in SERVICES for m in service.methods} - {"Converse"}
    assert {*called, "ConnectRank"} == rpcs | set(CALLS.values())
    for one, replies in told:
        for rpc, reply in replies.items():
            assert (reply.header.engine_id, reply.header.incarnation) == (one.engine_id, one.incarnation()), rpc


def test_event_seq_grows_with_every_change_of_a_transfer(source: Engine) -> None:
    first = source.hand_over(prompt(16))
    second = source.hand_over(prompt(16))
    assert second.header.event_seq > first.header.event_seq
    assert second.transfer.event_seq == second.header.event_seq


Page = Callable[[Engine, int, str], tuple[list[str], str]]


def page_of_transfers(engine: Engine, size: int, token: str) -> tuple[list[str], str]:
    wanted = transfer_pb2.TransferFilter(states=[transfer_pb2.TRANSFER_STATE_PENDING])
    request = transfer_pb2.ListTransfersRequest(filter=wanted, page_size=size, page_token=token)
    reply = engine.api.transfers.ListTransfers(request)
    return [t.transfer_id for t in reply.transfers], reply.next_page_token


def page_of_leases(engine: Engine, size: int, token: str) -> tuple[list[str], str]:
    reply = engine.api.leases.ListLeases(lease_pb2.ListLeasesRequest(page_size=size, page_token=token))
    return [lease.lease_id for lease in reply.leases], reply.next_page_token


def page_of_pins(engine: Engine, size: int, token: str) -> tuple[list[str], str]:
    reply = engine.api.admin.ListPins(admin_pb2.ListPinsRequest(page_size=size, page_token=token))
    return [pin.owner for pin in reply.pins], reply.next_page_token


EVERY_LIST = pytest.mark.parametrize("page", [page_of_transfers, page_of_leases, page_of_pins])


def all_pages(engine: Engine, page: Page, size: int) -> tuple[list[str], list[int]]:
    found: list[str] = []
    sizes: list[int] = []
    token = ""
    while token or not sizes:
        rows, token = page(engine, size, token)
        found += rows
        sizes.append(len(rows))
    return found, sizes


def hand_over_many(engine: Engine, count: int) -> list[handoff_pb2.FinishedBlocksResponse]:
    return [engine.hand_over(prompt(16, i), [block]) for i, block in enumerate(engine.allocate(count))]


@EVERY_LIST
@pytest.mark.parametrize("size", [1, 3, 7, 8])
def test_pages_together_are_the_list(source: Engine, page: Page, size: int) -> None:
    hand_over_many(source, 7)
    whole, _ = page(source, 1000, "")
    found, sizes = all_pages(source, page, size)
    assert found == whole
    assert len(whole) == 7
    assert max(sizes) <= size


@EVERY_LIST
def test_no_page_size_means_100_and_none_is_above_1000(source: Engine, page: Page) -> None:
    hand_over_many(source, 120)
    assert len(page(source, 0, "")[0]) == 100
    assert len(page(source, 4_000_000_000, "")[0]) == 120


@EVERY_LIST
def test_what_ends_between_two_pages_hides_nothing_else(source: Engine, page: Page) -> None:
    handed = hand_over_many(source, 6)
    whole, _ = page(source, 1000, "")
    first, token = page(source, 2, "")
    gone = whole[0]
    for reply in handed:
        if gone in {reply.lease.lease_id, reply.transfer.transfer_id}:
            source.release(reply.lease.lease_id)
    rest, _ = page(source, 1000, token)
    assert [*first, *rest] == whole


@EVERY_LIST
def test_what_begins_between_two_pages_repeats_nothing(source: Engine, page: Page) -> None:
    hand_over_many(source, 6)
    first, token = page(source, 2, "")
    source.hand_over(prompt(16))
    rest, _ = page(source, 1000, token)
    assert not set(first) & set(rest)


@EVERY_LIST
def test_a_page_token_that_no_reply_gave_is_refused(source: Engine, page: Page) -> None:
    with unchanged(source), refused(source.api, "INVALID_ARGUMENT", "INVALID_FIELD"):
        page(source, 10, "x")


def ids_of_transfers(engine: Engine, **wanted: Any) -> list[str]:
    request = transfer_pb2.ListTransfersRequest(filter=transfer_pb2.TransferFilter(**wanted), page_size=1000)
    return [t.transfer_id for t in engine.api.transfers.ListTransfers(request).transfers]


def test_transfers_are_listed_newest_first(source: Engine) -> None:
    handed = [reply.transfer.transfer_id for reply in hand_over_many(source, 3)]
    assert ids_of_transfers(source)[:3] == handed[::-1]


def test_a_filter_keeps_only_what_matches_every_field_of_it(source: Engine, destination: Engine) -> None:
    trace, label = "ab" * 16, new_key().hex()
    tokens = prompt(16)
    handed = source.hand_over(tokens, request_id=label)
    other = source.hand_over(tokens, request_id=label)
    metadata = (("traceparent", f"00-{trace}-00f067aa0ba902b7-01"),)
    request = handoff_pb2.PullBlocksRequest(grant=handed.grant, content=content(tokens), request_id=label)
    pulled = destination.api.handoff.PullBlocks(request, metadata=metadata).transfer.transfer_id
    pending, active = transfer_pb2.TRANSFER_STATE_PENDING, transfer_pb2.TRANSFER_STATE_ACTIVE
    assert set(ids_of_transfers(source, request_id=label)) == {handed.transfer.transfer_id, other.transfer.transfer_id}
    assert ids_of_transfers(source, request_id=f"{label}-") == []
    assert ids_of_transfers(destination, trace_id=trace, request_id=label) == [pulled]
    assert ids_of_transfers(destination, peer_engine_id=source.engine_id, states=[pending]) == [pulled]
    assert ids_of_transfers(destination, request_id=label, states=[active]) == []
    assert ids_of_transfers(destination, request_id=label, states=[pending, active]) == [pulled]
    held, returned = transfer_pb2.MEMORY_DISPOSITION_HELD, transfer_pb2.MEMORY_DISPOSITION_RETURNED
    assert ids_of_transfers(destination, request_id=label, memory_dispositions=[held]) == [pulled]
    assert ids_of_transfers(destination, request_id=label, memory_dispositions=[returned]) == []
    assert ids_of_transfers(destination, request_id=label, min_age={"seconds": 3600}) == []


def test_leases_are_listed_by_the_request_that_they_serve(source: Engine) -> None:
    label = new_key().hex()
    handed = source.hand_over(prompt(16), request_id=label)
    source.hand_over(prompt(16))
    reply = source.api.leases.ListLeases(lease_pb2.ListLeasesRequest(request_id=label))
    assert [lease.lease_id for lease in reply.leases] == [handed.lease.lease_id]


def owners_of(engine: Engine, block: int) -> Sequence[str]:
    reply = engine.api.admin.ListPins(admin_pb2.ListPinsRequest(block=admin_pb2.BlockRef(block=block)))
    return [pin.owner for pin in reply.pins]


def test_pins_of_one_block_are_those_on_it(source: Engine) -> None:
    blocks = source.allocate(2)
    first = source.hand_over(prompt(32), blocks).lease.lease_id
    second = source.hand_over(prompt(16), blocks[1:]).lease.lease_id
    assert owners_of(source, blocks[0]) == [first]
    assert owners_of(source, blocks[1]) == [first, second]


@pytest.mark.parametrize(("index", "block"), [(0, 520), (4_294_967_295, 0)])
def test_pins_of_a_block_that_does_not_exist_are_out_of_range(source: Engine, index: int, block: int) -> None:
    request = admin_pb2.ListPinsRequest(block=admin_pb2.BlockRef(group=index, block=block))
    with unchanged(source), refused(source.api, "OUT_OF_RANGE", "BLOCK_OUT_OF_RANGE"):
        source.api.admin.ListPins(request)


def test_no_reply_is_longer_than_a_message_may_be(start: Start) -> None:
    (engine,) = start((), settings=SETTINGS + "message_bytes = 9000\n")
    blocks = engine.allocate(1)
    for _ in range(100):
        engine.hand_over(prompt(16), blocks)
    few = engine.api.leases.ListLeases(lease_pb2.ListLeasesRequest(page_size=10))
    assert 900 < few.ByteSize() < 9_000
    with refused(engine.api, "OUT_OF_RANGE", "LIMIT_EXCEEDED"):
        engine.api.leases.ListLeases(lease_pb2.ListLeasesRequest(page_size=100))
    reflect: Any = engine.api.channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol="kvgrpc.v1.TransferService")
    with pytest.raises(grpc.RpcError) as caught:
        list(reflect(iter([asked.SerializeToString()]), timeout=10))
    assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
    assert "the limit is 9000" in str(caught.value.details())
