"""Idempotency keys and validate_only: a repeated call acts once, and a validating call does not act."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from kvgrpc.v1 import handoff_pb2, lease_pb2, pool_pb2, transfer_pb2
from tests.service.api import refused, without
from tests.service.conftest import SETTINGS, Start
from tests.service.engines import SUCCEEDED, Engine, unchanged, wait_until
from tests.service.values import content, dur, for_readers, group, new_key, prompt

TOKENS = prompt(16)
Send = Callable[[Any], Message]


def call_and_other_body(  # noqa: PLR0911 - one return for each RPC
    engine: Engine, peer: Engine, rpc: str, key: str
) -> tuple[Send, Message, Message]:
    """Returns a mutating RPC, a body under the key, and another body under the same key."""
    blocks = engine.allocate(1)
    id_key: dict[str, Any] = {"idempotency_key": key}
    first: Message
    other: Message
    if rpc == "FinishedBlocks":
        row: dict[str, Any] = {
            "transfer_key": new_key(),
            "blocks": engine.blocks(blocks),
            "content": content(TOKENS),
        }
        first = for_readers(**id_key, **row)
        other = for_readers(**id_key, **row, request_id="other")
        return engine.api.handoff.FinishedBlocks, first, other
    if rpc == "PullBlocks":
        pull: dict[str, Any] = {"grant": peer.hand_over(TOKENS).grant, "content": content(TOKENS)}
        first = handoff_pb2.PullBlocksRequest(**id_key, **pull, destination=engine.into(blocks))
        other = handoff_pb2.PullBlocksRequest(**id_key, **pull)
        return engine.api.handoff.PullBlocks, first, other
    if rpc == "GrantLease":
        lease: dict[str, Any] = {"blocks": engine.blocks(blocks), "content": content(TOKENS)}
        first = lease_pb2.GrantLeaseRequest(**id_key, **lease)
        other = lease_pb2.GrantLeaseRequest(**id_key, **lease, ttl=dur(5))
        return engine.api.leases.GrantLease, first, other
    if rpc == "ReleaseLease":
        refs = [lease_pb2.LeaseRef(lease_id=engine.hand_over(TOKENS).lease.lease_id) for _ in range(2)]
        first, other = (lease_pb2.ReleaseLeaseRequest(**id_key, lease=ref) for ref in refs)
        return engine.api.leases.ReleaseLease, first, other
    if rpc == "CancelTransfer":
        ids = [engine.hand_over(TOKENS).transfer.transfer_id for _ in range(2)]
        first, other = (transfer_pb2.CancelTransferRequest(**id_key, transfer_id=id_) for id_ in ids)
        return engine.api.transfers.CancelTransfer, first, other
    if rpc == "AcknowledgeTransfers":
        first, other = (
            transfer_pb2.AcknowledgeTransfersRequest(**id_key, transfer_ids=[id_]) for id_ in ("t-1", "t-2")
        )
        return engine.api.transfers.AcknowledgeTransfers, first, other
    if rpc == "AllocateBlocks":
        first, other = (
            pool_pb2.AllocateBlocksRequest(
                **id_key, group_block_counts=[pool_pb2.GroupBlockCount(block_count=n)], ttl=dur(60)
            )
            for n in (1, 2)
        )
        return engine.api.pool.AllocateBlocks, first, other
    assert rpc == "FreeBlocks"
    more = engine.allocate(1)
    first, other = (pool_pb2.FreeBlocksRequest(**id_key, blocks=engine.blocks(ids)) for ids in (blocks, more))
    return engine.api.pool.FreeBlocks, first, other


MUTATING = ["FinishedBlocks", "PullBlocks", "GrantLease", "ReleaseLease", "CancelTransfer", "AcknowledgeTransfers"]
MUTATING += ["AllocateBlocks", "FreeBlocks"]


def end_allocations(engine: Engine, reply: Message) -> None:
    if isinstance(reply, pool_pb2.AllocateBlocksResponse):
        engine.api.pool.FreeBlocks(pool_pb2.FreeBlocksRequest(blocks=reply.blocks))


def answer(reply: Message) -> str:
    return without(reply, "event_seq", "age", "remaining", "cap_remaining", "duration")


@pytest.mark.parametrize("rpc", MUTATING)
def test_the_same_key_and_body_get_the_same_answer_and_act_once(source: Engine, destination: Engine, rpc: str) -> None:
    send, request, other = call_and_other_body(destination, source, rpc, new_key().hex())
    first = send(request)
    for id_ in destination_transfers(first):
        destination.wait(id_)
    with unchanged(destination):
        assert answer(send(request)) == answer(first)
        assert answer(send(request)) == answer(first)
        with refused(destination.api, "ALREADY_EXISTS", "IDEMPOTENCY_KEY_REUSED"):
            send(other)
    end_allocations(destination, first)


def destination_transfers(reply: Message) -> list[str]:
    """Returns the transfers that go on after the reply."""
    return [reply.transfer.transfer_id] if isinstance(reply, handoff_pb2.PullBlocksResponse) else []


def test_without_a_key_nothing_is_remembered(source: Engine) -> None:
    request = pool_pb2.AllocateBlocksRequest(group_block_counts=[pool_pb2.GroupBlockCount(block_count=1)])
    first, second = (source.api.pool.AllocateBlocks(request) for _ in range(2))
    assert first.blocks != second.blocks
    end_allocations(source, first)
    end_allocations(source, second)


def test_a_key_belongs_to_its_method(source: Engine) -> None:
    key = new_key().hex()
    allocation = pool_pb2.AllocateBlocksRequest(
        idempotency_key=key, group_block_counts=[pool_pb2.GroupBlockCount(block_count=1)]
    )
    allocated = source.api.pool.AllocateBlocks(allocation)
    source.api.pool.FreeBlocks(pool_pb2.FreeBlocksRequest(idempotency_key=key, blocks=allocated.blocks))


def test_a_refused_call_does_not_use_its_key_up(source: Engine) -> None:
    source.allocate(1)
    key = new_key().hex()
    request = pool_pb2.AllocateBlocksRequest(
        idempotency_key=key, group_block_counts=[pool_pb2.GroupBlockCount(block_count=520)]
    )
    with refused(source.api, "RESOURCE_EXHAUSTED", "POOL_EXHAUSTED"):
        source.api.pool.AllocateBlocks(request)
    request.group_block_counts[0].block_count = 1
    end_allocations(source, source.api.pool.AllocateBlocks(request))


def test_a_key_has_a_length(source: Engine) -> None:
    request = pool_pb2.AllocateBlocksRequest(
        idempotency_key="k" * 257, group_block_counts=[pool_pb2.GroupBlockCount(block_count=1)]
    )
    with unchanged(source), refused(source.api, "INVALID_ARGUMENT", "INVALID_FIELD"):
        source.api.pool.AllocateBlocks(request)


def acknowledged(engine: Engine, key: str, id_: str) -> bool:
    """Returns whether the call went through. If not, its key still belongs to another body."""
    request = transfer_pb2.AcknowledgeTransfersRequest(idempotency_key=key, transfer_ids=[id_])
    try:
        engine.api.transfers.AcknowledgeTransfers(request)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS  # noqa: PT017 - the call may succeed or fail
        return False
    return True


def test_a_key_is_kept_as_long_as_what_it_created(start: Start) -> None:
    (engine,) = start((), settings=SETTINGS + "idempotency_s = 0.3\n")
    made = []
    for rpc in ("FinishedBlocks", "GrantLease", "AllocateBlocks"):
        send, request, _ = call_and_other_body(engine, engine, rpc, f"kept-{rpc}")
        made.append((send, request, send(request)))
    assert acknowledged(engine, "short", "t-1")
    # When a younger key is forgotten, the minimum time of the older keys is over, too.
    wait_until(lambda: acknowledged(engine, "short", "t-2"))
    with unchanged(engine):
        for send, request, first in made:
            assert answer(send(request)) == answer(first)


def test_validate_only_of_a_hand_over_changes_nothing(source: Engine) -> None:
    blocks = source.allocate(1)
    with unchanged(source):
        reply = source.hand_over(TOKENS, blocks, validate_only=True)
    assert not reply.HasField("grant")
    assert not reply.HasField("transfer")
    assert source.hand_over(TOKENS, blocks).HasField("grant")


def test_validate_only_of_a_pull_changes_nothing(source: Engine, destination: Engine) -> None:
    handed, blocks = source.hand_over(TOKENS), destination.allocate(1)
    with unchanged(source, destination):
        assert not destination.pull(handed.grant, TOKENS, blocks, validate_only=True).transfer_id
    pulled = destination.pull(handed.grant, TOKENS, blocks)
    assert destination.wait(pulled.transfer_id).state == SUCCEEDED


def test_validate_only_of_the_blocks_of_a_pull_changes_nothing(source: Engine, destination: Engine) -> None:
    handed, blocks = source.hand_over(TOKENS), destination.allocate(1)
    pulled = destination.pull(handed.grant, TOKENS, None)
    wait_until(lambda: destination.get(pulled.transfer_id).waiting_for == transfer_pb2.WAITING_FOR_BLOCKS)
    request = handoff_pb2.PullBlocksRequest(
        transfer_id=pulled.transfer_id,
        destination=destination.into(blocks),
        validate_only=True,
    )
    with unchanged(source, destination):
        destination.api.handoff.PullBlocks(request)
    request.destination.blocks.groups[0].CopyFrom(group([*blocks, *blocks]))
    with unchanged(source, destination), refused(destination.api, "INVALID_ARGUMENT", "BLOCK_DUPLICATE"):
        destination.api.handoff.PullBlocks(request)
    destination.give(pulled.transfer_id, blocks)
    assert destination.wait(pulled.transfer_id).state == SUCCEEDED


@pytest.mark.parametrize("wrong", [{"transfer_key": b"short"}, {"ttl": dur(-1)}, {"consumer_count": 4_000_000}])
def test_validate_only_refuses_what_the_call_would_refuse(source: Engine, wrong: dict[str, Any]) -> None:
    blocks = source.allocate(1)
    refusals = [
        source.api.refusal(lambda: source.hand_over(TOKENS, blocks, validate_only=only, **wrong))  # noqa: B023
        for only in (True, False)
    ]
    assert refusals[0] == refusals[1]
