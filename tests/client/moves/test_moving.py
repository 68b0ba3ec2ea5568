"""One call moves the KV of a prompt between real servers, and failed transfers raise errors."""

from collections.abc import AsyncIterator, Iterator

import pytest

from kvgrpc.client import Client, TransferFailed, block_ids, check_transfer, connect, connect_sync, move, move_sync
from kvgrpc.errors import Aborted, Exhausted, NextStep, Reason
from kvgrpc.v1.common_pb2 import (
    FAILURE_REASON_LEASE_EXPIRED,
    NEXT_STEP_RECOMPUTE,
    TRANSFER_PHASE_SETTLE,
    Blocks,
    Failure,
)
from kvgrpc.v1.transfer_pb2 import (
    TRANSFER_STATE_ACTIVE,
    TRANSFER_STATE_CANCELLED,
    TRANSFER_STATE_FAILED,
    TRANSFER_STATE_SUCCEEDED,
    Transfer,
)
from tests.client.serving import Served, served

TOKENS = list(range(100, 100 + 4 * 16))
UNKNOWN = 99


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Served, Served]]:
    with served("--engine-id", "P") as source, served("--engine-id", "D") as destination:
        yield source, destination


@pytest.fixture
async def source(servers: tuple[Served, Served]) -> AsyncIterator[Client]:
    async with connect(servers[0].address) as made:
        yield made
        assert not (await made.pins()).pins


@pytest.fixture
async def destination(servers: tuple[Served, Served]) -> AsyncIterator[Client]:
    async with connect(servers[1].address) as made:
        yield made
        assert not (await made.allocations()).allocations
        assert not (await made.pins()).pins


async def test_one_call_moves_the_kv_of_a_prompt(source: Client, destination: Client) -> None:
    taken = await source.allocate(4)
    moved = await move(source, destination, taken, TOKENS, request_id="chat-1")
    assert (moved.transfer.state, moved.transfer.use_tokens) == (TRANSFER_STATE_SUCCEEDED, len(TOKENS))
    (held,) = (await destination.allocations(request_id="chat-1")).allocations
    assert (held.allocation_id, held.label) == (moved.blocks.allocation_id, "move")
    assert len(block_ids(moved.blocks)) == 4
    await destination.free(moved.blocks)
    await source.free(taken)


async def test_blocks_that_are_named_are_filled_and_stay_the_callers(source: Client, destination: Client) -> None:
    taken, target = await source.allocate(4), await destination.allocate(4)
    moved = await move(source, destination, taken, TOKENS, into=target)
    assert moved.blocks == target.blocks
    await destination.free(target)
    await source.free(taken)


async def test_a_move_that_fails_leaves_nothing_behind(source: Client, destination: Client) -> None:
    taken = await source.allocate(4)
    stale = Blocks(incarnation=1, groups=taken.blocks.groups)
    with pytest.raises(Aborted) as refused:
        await move(source, destination, stale, TOKENS)
    assert refused.value.reason is Reason.INCARNATION_CHANGED
    every = await destination.allocate(64)
    with pytest.raises(Exhausted):
        await move(source, destination, taken, TOKENS)
    await destination.free(every)
    await source.free(taken)


async def test_a_pull_of_other_tokens_is_a_typed_error(source: Client, destination: Client) -> None:
    taken, target = await source.allocate(4), await destination.allocate(4)
    handed_over = await source.finished_blocks(taken, TOKENS)
    ended = await destination.pull(handed_over.grant, [1, *TOKENS[1:]], blocks=target)
    with pytest.raises(TransferFailed) as failed:
        check_transfer(ended)
    assert (failed.value.reason, failed.value.next) == (Reason.CONTENT_MISMATCH, NextStep.FIX_REQUEST)
    assert failed.value.metadata == {"transfer_id": ended.transfer_id, "phase": "open"}
    assert failed.value.transfer == ended
    await source.cancel(handed_over.transfer.transfer_id)
    await destination.free(target)
    await source.free(taken)


def test_synchronous_clients_move_too(servers: tuple[Served, Served]) -> None:
    with connect_sync(servers[0].address) as source, connect_sync(servers[1].address) as destination:
        taken = source.allocate(4)
        moved = move_sync(source, destination, taken, TOKENS)
        assert moved.transfer.state == TRANSFER_STATE_SUCCEEDED
        destination.free(moved.blocks)
        source.free(taken)


def test_a_transfer_that_succeeded_or_is_not_over_is_no_error() -> None:
    for state in (TRANSFER_STATE_ACTIVE, TRANSFER_STATE_SUCCEEDED, UNKNOWN):
        transfer = Transfer(state=state)  # type: ignore[arg-type]
        assert check_transfer(transfer) is transfer


@pytest.mark.parametrize(
    ("transfer", "reason", "step", "message"),
    [
        (
            Transfer(
                state=TRANSFER_STATE_FAILED,
                failure=Failure(
                    reason=FAILURE_REASON_LEASE_EXPIRED, next=NEXT_STEP_RECOMPUTE, phase=TRANSFER_PHASE_SETTLE,
                    message="too late",
                ),
            ),
            Reason.LEASE_EXPIRED, NextStep.RECOMPUTE, "too late",
        ),
        (Transfer(state=TRANSFER_STATE_CANCELLED), Reason.CANCELLED, None, "the transfer has ended without its KV"),
        (
            Transfer(state=TRANSFER_STATE_FAILED, failure=Failure(reason=UNKNOWN, next=NEXT_STEP_RECOMPUTE)),  # type: ignore[arg-type]
            Reason.INTERNAL, None, "the transfer has ended without its KV",
        ),
    ],
)  # fmt: skip
def test_what_ended_without_its_kv_says_why_and_an_unknown_reason_has_no_step(
    transfer: Transfer, reason: Reason, step: NextStep | None, message: str
) -> None:
    with pytest.raises(TransferFailed) as failed:
        check_transfer(transfer)
    assert (failed.value.reason, failed.value.next, failed.value.message) == (reason, step, message)
