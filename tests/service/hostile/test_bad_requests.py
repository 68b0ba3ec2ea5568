"""Invalid hand-overs and pulls: each causes a typed error and changes nothing, and the server goes on."""

from typing import Any

import grpc
import pytest

from kvgrpc.v1 import common_pb2, handoff_pb2, lease_pb2, transfer_pb2
from tests.service.api import refused
from tests.service.conftest import SETTINGS, Start
from tests.service.engines import SUCCEEDED, Engine, memory_unchanged, unchanged, wait_until
from tests.service.values import content, dur, group, new_key, prompt

Blocks = list[common_pb2.GroupBlocks]
Fields = dict[str, Any]

TOKENS = prompt(40)
MINUS_ONE = 4_294_967_295
"""The uint32 that a negative id turns into."""


def runs(*pairs: tuple[int, int]) -> common_pb2.GroupBlocks:
    """Returns runs from (start, count) pairs."""
    starts, counts = [start for start, _ in pairs], [count for _, count in pairs]
    return common_pb2.GroupBlocks(runs=common_pb2.BlockRuns(starts=starts, counts=counts))


BAD_BLOCKS = [
    pytest.param([group([520, 0, 1])], "OUT_OF_RANGE", "BLOCK_OUT_OF_RANGE", id="first past the end"),
    pytest.param([group([0, 1, MINUS_ONE])], "OUT_OF_RANGE", "BLOCK_OUT_OF_RANGE", id="negative"),
    pytest.param([runs((518, 3))], "OUT_OF_RANGE", "BLOCK_OUT_OF_RANGE", id="run past the end"),
    pytest.param([runs((MINUS_ONE, 3))], "OUT_OF_RANGE", "BLOCK_OUT_OF_RANGE", id="run past 32 bits"),
    pytest.param([group([0, 1, 0])], "INVALID_ARGUMENT", "BLOCK_DUPLICATE", id="duplicate"),
    pytest.param([runs((0, 2), (1, 1))], "INVALID_ARGUMENT", "BLOCK_DUPLICATE", id="overlapping runs"),
    pytest.param([runs((0, 0), (0, 3))], "INVALID_ARGUMENT", "INVALID_FIELD", id="empty run"),
    pytest.param(
        [common_pb2.GroupBlocks(runs=common_pb2.BlockRuns(starts=[0, 1, 2], counts=[1, 1]))],
        "INVALID_ARGUMENT", "INVALID_FIELD", id="starts without counts",
    ),
    pytest.param([group([0, 1, 2], 1)], "INVALID_ARGUMENT", "GROUP_MISMATCH", id="unknown group"),
    pytest.param([group([0, 1, 2], MINUS_ONE)], "INVALID_ARGUMENT", "GROUP_MISMATCH", id="negative group"),
    pytest.param([group([0, 1]), group([2])], "INVALID_ARGUMENT", "GROUP_MISMATCH", id="group twice"),
    pytest.param([runs((0, 1_000_000))], "OUT_OF_RANGE", "LIMIT_EXCEEDED", id="a million in a run"),
    pytest.param([runs((0, MINUS_ONE))], "OUT_OF_RANGE", "LIMIT_EXCEEDED", id="4 billion in a run"),
    pytest.param([runs(*[(0, MINUS_ONE)] * 1000)], "OUT_OF_RANGE", "LIMIT_EXCEEDED", id="past 64 bits"),
    pytest.param([group(range(500_000))], "OUT_OF_RANGE", "LIMIT_EXCEEDED", id="half a million runs"),
    pytest.param([runs((0, 60_000)), runs((0, 60_000))], "OUT_OF_RANGE", "LIMIT_EXCEEDED", id="limit over rows"),
    pytest.param([group([517, 518, 519])], "FAILED_PRECONDITION", "BLOCK_NOT_ALLOCATED", id="not allocated"),
]  # fmt: skip
ONE_OF_EACH_REASON = list({row.values[2]: row for row in BAD_BLOCKS}.values())


@pytest.mark.parametrize(("blocks", "code", "reason"), BAD_BLOCKS)
def test_a_hand_over_of_bad_blocks_is_refused(source: Engine, blocks: Blocks, code: str, reason: str) -> None:
    source.allocate(3)
    with unchanged(source), refused(source.api, code, reason):
        source.hand_over(TOKENS, [], blocks=blocks)


@pytest.mark.parametrize(("blocks", "code", "reason"), ONE_OF_EACH_REASON)
def test_a_lease_of_bad_blocks_is_refused(source: Engine, blocks: Blocks, code: str, reason: str) -> None:
    source.allocate(3)
    request = lease_pb2.GrantLeaseRequest(blocks=source.named(*blocks), content=content(TOKENS))
    with unchanged(source), refused(source.api, code, reason):
        source.api.leases.GrantLease(request)


@pytest.mark.parametrize(("blocks", "code", "reason"), ONE_OF_EACH_REASON)
def test_pulls_to_bad_blocks_fail(source: Engine, destination: Engine, blocks: Blocks, code: str, reason: str) -> None:
    destination.allocate(3)
    request = handoff_pb2.PullBlocksRequest(
        grant=source.hand_over(TOKENS).grant,
        content=content(TOKENS),
        destination=handoff_pb2.PullDestination(blocks=destination.named(*blocks)),
    )
    with unchanged(source, destination), refused(destination.api, code, reason):
        destination.api.handoff.PullBlocks(request)


@pytest.mark.parametrize("count", [2, 4])
def test_a_pull_into_more_or_fewer_blocks_is_refused(source: Engine, destination: Engine, count: int) -> None:
    grant, blocks = source.hand_over(TOKENS).grant, destination.allocate(count)
    with unchanged(source, destination), refused(destination.api, "INVALID_ARGUMENT", "BLOCK_COUNT_MISMATCH"):
        destination.pull(grant, TOKENS, blocks)


def test_a_pull_into_blocks_that_something_else_pins_is_refused(source: Engine, destination: Engine) -> None:
    grant = source.hand_over(TOKENS, on_abort=common_pb2.ON_ABORT_KEEP).grant
    leased = destination.allocate(3)
    destination.hand_over(TOKENS, leased)
    with unchanged(source, destination), refused(destination.api, "FAILED_PRECONDITION", "BLOCK_PINNED"):
        destination.pull(grant, TOKENS, leased)
    target = destination.allocate(3)
    # The source holds this pull back, because the named step never comes.
    waiting = destination.pull(grant, TOKENS, target, after_step=1)
    wait_until(lambda: destination.get(waiting.transfer_id).waiting_for == transfer_pb2.WAITING_FOR_STEP)
    with unchanged(source, destination):
        with refused(destination.api, "FAILED_PRECONDITION", "BLOCK_PINNED"):
            destination.pull(grant, TOKENS, target)
        with refused(destination.api, "FAILED_PRECONDITION", "BLOCK_PINNED"):
            destination.hand_over(TOKENS, target)


BAD_HAND_OVERS: list[Any] = [
    pytest.param({"transfer_key": b""}, "INVALID_ARGUMENT", "INVALID_FIELD", id="no key"),
    pytest.param({"request_id": "r" * 257}, "INVALID_ARGUMENT", "INVALID_FIELD", id="long label"),
    pytest.param({"content": None}, "INVALID_ARGUMENT", "CONTENT_REQUIRED", id="no content"),
    pytest.param(
        {"content": common_pb2.Content(chain=common_pb2.ContentChain(digests=b"x" * 96, token_count=MINUS_ONE))},
        "INVALID_ARGUMENT", "INVALID_FIELD", id="chain of 4 billion tokens",
    ),
    pytest.param({"content": content(prompt(49))}, "FAILED_PRECONDITION", "CONTENT_RANGE", id="more tokens than fit"),
    pytest.param({"blocks": []}, "FAILED_PRECONDITION", "EMPTY_FINISH", id="nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "code", "reason"), BAD_HAND_OVERS)
def test_a_hand_over_that_cannot_be_is_refused(source: Engine, fields: Fields, code: str, reason: str) -> None:
    blocks = source.allocate(3)
    with unchanged(source), refused(source.api, code, reason):
        source.hand_over(TOKENS, blocks, **fields)


def test_content_of_other_weights_is_refused(source: Engine, destination: Engine) -> None:
    blocks, grant = source.allocate(3), source.hand_over(TOKENS).grant
    other = content(TOKENS, weights_revision="another")
    with unchanged(source, destination):
        refusal = source.api.refusal(lambda: source.hand_over(TOKENS, blocks, content=other))
        assert refusal.reason == "WEIGHTS_MISMATCH"
        refusal = destination.api.refusal(lambda: destination.pull(grant, TOKENS, None, content=other))
        assert refusal.reason == "WEIGHTS_MISMATCH"


def test_a_multimodal_item_that_cannot_be_is_refused(source: Engine) -> None:
    blocks = source.allocate(3)
    tokens = common_pb2.TokenContent(token_ids=TOKENS, multimodal_items=[common_pb2.MultimodalItem(digest=b"x")])
    with unchanged(source), refused(source.api, "INVALID_ARGUMENT", "INVALID_FIELD"):
        source.hand_over(TOKENS, blocks, content=common_pb2.Content(tokens=tokens))


def test_a_transfer_key_is_handed_over_under_once(source: Engine) -> None:
    key, blocks = new_key(), source.allocate(3)
    source.hand_over(TOKENS, blocks, transfer_key=key)
    with unchanged(source), refused(source.api, "ALREADY_EXISTS", "TRANSFER_EXISTS"):
        source.hand_over(TOKENS, blocks, transfer_key=key)


def test_a_lease_id_is_used_once(source: Engine) -> None:
    blocks = source.allocate(3)
    lease_id = source.hand_over(TOKENS, blocks).lease.lease_id
    with unchanged(source):
        refusal = source.api.refusal(lambda: source.hand_over(TOKENS, blocks, lease_id=lease_id))
    assert refusal.reason in {"TRANSFER_EXISTS", "INVALID_FIELD", "NOT_OWNER"}


# ---- pulls


BAD_PULLS: list[Any] = [
    pytest.param({"content": None}, "INVALID_ARGUMENT", "CONTENT_REQUIRED", id="no content"),
    pytest.param({"request_id": "r" * 257}, "INVALID_ARGUMENT", "INVALID_FIELD", id="long label"),
    pytest.param({"queue_timeout": dur(0)}, "INVALID_ARGUMENT", "INVALID_FIELD", id="no time to queue"),
    pytest.param({"transfer_timeout": dur(-1)}, "INVALID_ARGUMENT", "INVALID_FIELD", id="negative time to move"),
]


@pytest.mark.parametrize(("fields", "code", "reason"), BAD_PULLS)
def test_a_bad_pull_is_refused(source: Engine, destination: Engine, fields: Fields, code: str, reason: str) -> None:
    grant, blocks = source.hand_over(TOKENS).grant, destination.allocate(3)
    with unchanged(source, destination), refused(destination.api, code, reason):
        destination.pull(grant, TOKENS, blocks, **fields)


def test_a_pull_must_name_a_grant_or_a_transfer(source: Engine, destination: Engine) -> None:
    handed = source.hand_over(TOKENS)
    wrong = [
        handoff_pb2.PullBlocksRequest(),
        handoff_pb2.PullBlocksRequest(content=content(TOKENS)),
        handoff_pb2.PullBlocksRequest(transfer_id="t-1"),
    ]
    with unchanged(source, destination):
        for request in wrong:
            with refused(destination.api, "INVALID_ARGUMENT", "INVALID_FIELD"):
                destination.api.handoff.PullBlocks(request)
        with refused(destination.api, "NOT_FOUND", "TRANSFER_NOT_FOUND"):
            destination.give("t-1", [0, 1, 2])
        with refused(source.api, "NOT_FOUND", "TRANSFER_NOT_FOUND"):
            source.give(handed.transfer.transfer_id, [])


def test_a_pull_of_nothing_settles_and_releases_the_source(source: Engine, destination: Engine) -> None:
    handed = source.hand_over(TOKENS)
    with memory_unchanged(destination):
        pulled = destination.pull(handed.grant, TOKENS, [])
        end = destination.wait(pulled.transfer_id)
    assert (end.state, end.total_bytes, end.block_count, end.use_tokens) == (SUCCEEDED, 0, 0, 40)
    assert source.wait(handed.transfer.transfer_id).state == SUCCEEDED
    assert source.lease(handed.lease.lease_id).state == lease_pb2.LEASE_STATE_DONE


def test_a_pull_gets_its_blocks_once(source: Engine, destination: Engine) -> None:
    grant = source.hand_over(TOKENS).grant
    target = destination.allocate(6)
    waiting = destination.pull(grant, TOKENS, target[:3], after_step=1)
    wait_until(lambda: destination.get(waiting.transfer_id).waiting_for == transfer_pb2.WAITING_FOR_STEP)
    with unchanged(source, destination):
        refusal = destination.api.refusal(lambda: destination.give(waiting.transfer_id, target[3:]))
    assert refusal.reason in {"TRANSFER_EXISTS", "TRANSFER_ENDED"}


def test_the_queue_timeout_ends_a_pull_that_does_not_get_its_turn(source: Engine, destination: Engine) -> None:
    grant, target = source.hand_over(TOKENS).grant, destination.allocate(3)
    with memory_unchanged(destination):
        pulled = destination.pull(grant, TOKENS, target, after_step=1, queue_timeout=dur(0.1))
        end = destination.wait(pulled.transfer_id)
    assert (end.failure.reason, end.failure.phase) == (
        common_pb2.FAILURE_REASON_QUEUE_TIMEOUT,
        common_pb2.TRANSFER_PHASE_QUEUE,
    )
    assert end.failure.next == common_pb2.NEXT_STEP_RETRY_HERE


def test_transfers_are_bounded(start: Start) -> None:
    (engine,) = start((), settings=SETTINGS + "transfers = 2\n")
    grant = engine.hand_over(TOKENS).grant
    engine.pull(grant, TOKENS, None)
    refusal = engine.api.refusal(lambda: engine.pull(grant, TOKENS, None))
    assert (refusal.code, refusal.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
    assert refusal.retry_delay_s


def test_a_message_over_the_limit_is_refused(source: Engine) -> None:
    filters = transfer_pb2.TransferFilter(request_id="x" * (5 << 20))
    with unchanged(source), pytest.raises(grpc.RpcError) as caught:
        source.api.transfers.ListTransfers(transfer_pb2.ListTransfersRequest(filter=filters))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_destination_of_groups_that_the_pool_lacks_is_refused(source: Engine, destination: Engine) -> None:
    request = handoff_pb2.PullBlocksRequest(
        grant=source.hand_over(TOKENS).grant, content=content(TOKENS), destination=destination.into([])
    )
    request.destination.blocks.CopyFrom(destination.blocks([], 5))
    with unchanged(source, destination), refused(destination.api, "INVALID_ARGUMENT", "GROUP_MISMATCH"):
        destination.api.handoff.PullBlocks(request)
