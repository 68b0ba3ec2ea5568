"""A call between leads that is too long for its reader fails its transfer at once, because a retry would be as long."""

import pytest

from kvgrpc.v1 import common_pb2, handoff_pb2, transfer_pb2
from tests.service.conftest import SETTINGS, Start
from tests.service.engines import FAILED, Engine
from tests.service.pushes import check_a_good_push, finish, reason_of, register
from tests.service.values import new_key, prompt

BLOCKS = 4_096
TOKENS = prompt(BLOCKS * 16)
POOL = ("--blocks", str(3 * BLOCKS))
SMALL = f"{SETTINGS}message_bytes = 9000\n"
"""Settings whose message limit fits everything but thousands of scattered blocks."""
FEWER = 2_750
"""Number of blocks whose hand-over just fits."""
CONTENT = common_pb2.Content(opaque_id=b"prompt", opaque_tokens=len(TOKENS))
WITHIN_S = 5.0
"""Time limit, in seconds; far below any timeout of a transfer."""


@pytest.fixture
def far(start: Start) -> tuple[Engine, Engine]:
    """Returns two engines. The second one takes and sends short messages only."""
    (usual,) = start(POOL)
    (small,) = start(POOL, settings=SMALL)
    return usual, small


def runs(ids: list[int]) -> common_pb2.GroupBlocks:
    return common_pb2.GroupBlocks(runs=common_pb2.BlockRuns(starts=[ids[0]], counts=[len(ids)]))


def test_parts_that_their_destination_cannot_take_fail_the_push_at_both_ends(far: tuple[Engine, Engine]) -> None:
    source, destination = far
    blocks, target, key = source.allocate(2 * BLOCKS)[::2], destination.allocate(BLOCKS), new_key()
    reserved = destination.api.handoff.ReserveBlocks(
        handoff_pb2.ReserveBlocksRequest(transfer_key=key, blocks=destination.named(runs(target)), content=CONTENT)
    )
    sent = finish(source, key, [], blocks, content=CONTENT)
    register(source, reserved.grant)
    end = destination.wait(reserved.transfer.transfer_id, timeout_s=WITHIN_S)
    assert (end.state, reason_of(end)) == (FAILED, "SOURCE_FAILED")
    assert "OpenAccess would have" in end.failure.message
    assert source.get(sent.transfer.transfer_id).waiting_for == transfer_pb2.WAITING_FOR_REGISTRATION
    check_a_good_push(source, destination)


def test_parts_that_their_source_cannot_send_fail_the_push_at_both_ends(far: tuple[Engine, Engine]) -> None:
    destination, source = far
    blocks, target, key = source.allocate(2 * BLOCKS)[::2], destination.allocate(BLOCKS), new_key()
    reserved = destination.api.handoff.ReserveBlocks(
        handoff_pb2.ReserveBlocksRequest(transfer_key=key, blocks=destination.named(runs(target)), content=CONTENT)
    )
    for first in range(0, BLOCKS, 1024):
        finish(source, key, [], blocks[first : first + 1024], content=CONTENT, last=first + 1024 == BLOCKS)
    register(source, reserved.grant)
    end = destination.wait(reserved.transfer.transfer_id, timeout_s=WITHIN_S)
    assert (end.state, reason_of(end)) == (FAILED, "SOURCE_FAILED")
    assert "OpenAccess would have" in end.failure.message
    check_a_good_push(destination, source)


def test_an_answer_that_its_reader_cannot_take_fails_the_pull(far: tuple[Engine, Engine]) -> None:
    source, destination = far
    blocks = source.allocate(2 * BLOCKS)[::2]
    sent = source.hand_over(TOKENS, blocks, content=CONTENT)
    pull = destination.pull(sent.grant, TOKENS, None, content=CONTENT)
    end = destination.wait(pull.transfer_id, timeout_s=WITHIN_S)
    assert (end.state, reason_of(end)) == (FAILED, "LIMIT_EXCEEDED")
    check_a_good_push(source, destination)


def test_an_answer_that_its_source_may_not_send_fails_the_pull_and_no_other(far: tuple[Engine, Engine]) -> None:
    destination, source = far
    blocks = source.allocate(2 * FEWER)[::2]
    content = common_pb2.Content(opaque_id=b"prompt", opaque_tokens=16 * FEWER)
    sent = source.hand_over(TOKENS[: 16 * FEWER], blocks, content=content)
    pull = destination.pull(sent.grant, TOKENS[: 16 * FEWER], None, content=content)
    end = destination.wait(pull.transfer_id, timeout_s=WITHIN_S)
    assert (end.state, reason_of(end)) == (FAILED, "LIMIT_EXCEEDED")
    assert "the answer to OpenAccess has" in end.failure.message
    check_a_good_push(destination, source)
