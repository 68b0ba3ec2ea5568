"""Servers that compare the checksum of each block that arrives with its source's (setting `checksums`)."""

import itertools

import pytest

from kvgrpc.v1 import common_pb2
from tests.e2e.conftest import PATHS, Pair
from tests.e2e.pushing import BLOCKS, MIDWAY, SLOW, begin, check_came_to_rest, check_unhurt
from tests.service.conftest import Start
from tests.service.engines import CANCELLED, FAILED, RETURNED, SUCCEEDED, Engine
from tests.service.pushes import check_a_good_push, reason_of
from tests.service.values import prompt

TOKENS = prompt(BLOCKS * 16)
ALL = pytest.mark.parametrize("path", [*PATHS])


def pair_of(start: Start, path: str, *more: str) -> Pair:
    flags, environment = PATHS[path]
    source, destination = start(*[(*flags, *more)] * 2, settings="checksums = true\n", **environment)
    return source, destination


def change_until_over(source: Engine, block: int, destination: Engine, transfer_id: str) -> None:
    """Keeps overwriting a block, so that its checksum and the bytes that arrive belong to different contents."""
    for seed in itertools.count(4):
        source.write([block], seed)
        if destination.get(transfer_id).state in (SUCCEEDED, FAILED, CANCELLED):
            return


@ALL
def test_what_is_the_same_at_both_sides_succeeds(start: Start, path: str) -> None:
    source, destination = pair_of(start, path)
    blocks, target = source.allocate(BLOCKS), destination.allocate(BLOCKS)
    written = source.write(blocks, seed=3)
    pulled = destination.wait(destination.pull(source.hand_over(TOKENS, blocks).grant, TOKENS, target).transfer_id)
    assert pulled.state == SUCCEEDED, pulled.failure
    assert common_pb2.TRANSFER_PHASE_CHECKSUM in [timing.phase for timing in pulled.phases]
    assert destination.read(target) == written
    check_a_good_push(source, destination)
    check_unhurt(source)
    check_unhurt(destination)


def test_a_block_that_arrived_as_another_one_fails_the_pull_and_is_named(start: Start) -> None:
    """A change during the read stands for a broken transport: the bytes differ from those of the checksum."""
    source, destination = pair_of(start, "shm", *SLOW)
    blocks, target = source.allocate(BLOCKS), destination.allocate(BLOCKS)
    source.write(blocks, seed=3)
    pull = destination.pull(source.hand_over(TOKENS, blocks).grant, TOKENS, target)
    change_until_over(source, blocks[-1], destination, pull.transfer_id)
    failed = destination.wait(pull.transfer_id)
    assert (reason_of(failed), failed.memory) == ("CHECKSUM_MISMATCH", RETURNED)
    assert f"block {blocks[-1]} of group 0" in failed.failure.message
    assert f"received into block {target[-1]}" in failed.failure.message
    assert failed.failure.next == common_pb2.NEXT_STEP_RETRY_HERE
    check_unhurt(source)
    check_unhurt(destination)


def test_a_push_whose_bytes_changed_on_the_way_fails_at_both(start: Start) -> None:
    source, destination = pair_of(start, "shm", *SLOW)
    made = begin(source, destination, MIDWAY)
    change_until_over(source, made.blocks[-1], destination, made.received)
    check_came_to_rest(destination, made.received)
    assert reason_of(destination.get(made.received)) == "CHECKSUM_MISMATCH"
    source.cancel(made.sent)
    check_came_to_rest(source, made.sent)
    check_unhurt(source)
    check_unhurt(destination)
