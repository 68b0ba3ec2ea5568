"""The recycle proof: bytes that were read under a lease which ended meanwhile are never offered to anybody.

The source's lease ends under a reader. Its blocks are given out again and filled with other content while they are
read, so the reader gets some or all of another request's bytes. Its transfer must fail, whatever the data path reports.
"""

from dataclasses import dataclass

import pytest

from kvgrpc.v1 import common_pb2, lease_pb2, transfer_pb2
from tests.service.conftest import Start
from tests.service.engines import (
    FAILED,
    QUARANTINED,
    RETURNED,
    SUCCEEDED,
    Engine,
    wait_until,
)
from tests.service.values import dur, prompt

ACTIVE = transfer_pb2.TRANSFER_STATE_ACTIVE
TOKENS = prompt(32 * 16)
BLOCKS = 32
# 32 blocks of 2 KiB take two seconds.
SLOW = ("--bandwidth-limit-bytes-per-s", "32768")
EXPIRED = common_pb2.FAILURE_REASON_LEASE_EXPIRED
RELEASED = common_pb2.FAILURE_REASON_LEASE_RELEASED


def recycle(source: Engine, writer: Engine, blocks: list[int]) -> list[bytes]:
    """Gives the blocks out again and fills them from a third engine. Returns their new content."""
    wait_until(lambda: source.counts().free_block_count == source.counts().block_count)
    again = source.allocate(BLOCKS)
    assert again == blocks, "the lowest free blocks are given out first"
    theirs = writer.allocate(BLOCKS)
    written = writer.write(theirs, seed=77)
    grant = writer.hand_over(TOKENS, theirs).grant
    assert source.wait(source.pull(grant, TOKENS, again).transfer_id).state == SUCCEEDED
    assert source.read(again) == written
    return written


def check_failed(destination: Engine, pulled: transfer_pb2.Transfer, reason: int) -> None:
    """Checks that the pull failed for this reason, and its memory came back after the last posting."""
    end = destination.wait(pulled.transfer_id, returned=False)
    assert end.state == FAILED
    assert (end.failure.reason, end.failure.next) == (reason, common_pb2.NEXT_STEP_RECOMPUTE)
    assert end.failure.side == common_pb2.SIDE_SOURCE
    assert destination.wait(pulled.transfer_id).memory == RETURNED
    assert destination.pins() == []
    assert destination.get(pulled.transfer_id).state == FAILED, "late news changes no outcome"


def check_good_pull(source: Engine, destination: Engine) -> None:
    mine, target = source.allocate(4), destination.allocate(4)
    written = source.write(mine, seed=5)
    grant = source.hand_over(prompt(64, seed=9), mine).grant
    assert destination.wait(destination.pull(grant, prompt(64, seed=9), target).transfer_id).state == SUCCEEDED
    assert destination.read(target) == written


@dataclass(frozen=True)
class Reading:
    """A pull under way."""

    pulled: transfer_pb2.Transfer
    blocks: list[int]
    """Blocks of the source."""
    written: list[bytes]
    """Contents of these blocks when they were handed over."""
    target: list[int]


def begin(source: Engine, destination: Engine, ttl_s: float) -> tuple[str, Reading]:
    """Returns the lease id, and the pull that reads under it."""
    blocks, target = source.allocate(BLOCKS), destination.allocate(BLOCKS)
    written = source.write(blocks, seed=1)
    handed = source.hand_over(TOKENS, blocks, ttl=dur(ttl_s))
    source.free(blocks)  # they become free with the lease
    pulled = destination.pull(handed.grant, TOKENS, target)
    wait_until(lambda: destination.get(pulled.transfer_id).state == ACTIVE)
    return handed.lease.lease_id, Reading(pulled, blocks, written, target)


def check_recycled_under(reading: Reading, source: Engine, destination: Engine, writer: Engine, reason: int) -> None:
    """Checks the pull of an ended lease whose blocks get other content in the middle of the read."""
    pulled = reading.pulled
    assert destination.get(pulled.transfer_id).state == ACTIVE, "it still reads"
    with destination.process.stopped():
        recycled = recycle(source, writer, reading.blocks)
    check_failed(destination, pulled, reason)
    assert destination.read(reading.target) != reading.written, "the reader got other bytes: this test has teeth"
    assert source.read(reading.blocks) == recycled, "a peer's read never hurts the source"
    check_good_pull(source, destination)


@pytest.mark.parametrize("path", ["shm", "cma", "nixl"])
def test_a_lease_that_reaches_its_cap_under_a_reader_fails_it_with_lease_expired(start: Start, path: str) -> None:
    """The reader's renewals do not pass the cap."""
    paths = ("--data-paths", path)
    source, destination, writer = start(paths, (*paths, *SLOW), paths, settings="[limits]\nlease_cap_s = 0.4\n")
    lease_id, reading = begin(source, destination, ttl_s=0.3)
    wait_until(lambda: source.lease(lease_id).state == lease_pb2.LEASE_STATE_EXPIRED)
    assert source.lease(lease_id).renewal_count >= 1
    check_recycled_under(reading, source, destination, writer, EXPIRED)


@pytest.mark.parametrize("path", ["shm", "cma", "nixl"])
def test_a_lease_that_is_released_under_a_reader_fails_it_with_lease_released(start: Start, path: str) -> None:
    paths = ("--data-paths", path)
    source, destination, writer = start(paths, (*paths, *SLOW), paths)
    lease_id, reading = begin(source, destination, ttl_s=30)
    source.release(lease_id)
    check_recycled_under(reading, source, destination, writer, RELEASED)


def test_blocks_that_are_still_read_into_come_back_only_after_the_last_byte(start: Start) -> None:
    settings = "[limits]\ntransfer_timeout_s = 0.3\n"
    source, destination = start((), SLOW, settings=settings)
    _, reading = begin(source, destination, ttl_s=30)
    pulled = reading.pulled
    end = destination.wait(pulled.transfer_id, returned=False)
    assert (end.state, end.memory) == (FAILED, QUARANTINED)
    assert end.failure.reason == common_pb2.FAILURE_REASON_TRANSFER_TIMEOUT
    assert destination.counts().quarantined_block_count == BLOCKS
    (pin,) = destination.pins()
    assert pin.missing_proof == "the end of the posting of rank 0"
    assert destination.wait(pulled.transfer_id).memory == RETURNED
    assert destination.counts().quarantined_block_count == 0
    check_good_pull(source, destination)


def test_a_pull_that_waits_for_blocks_keeps_its_lease_alive_beyond_its_ttl(start: Start) -> None:
    source, destination = start((), ())
    ttl_s = 0.9
    blocks, target = source.allocate(4), destination.allocate(4)
    written = source.write(blocks, seed=2)
    handed = source.hand_over(prompt(64), blocks, ttl=dur(ttl_s))
    pulled = destination.pull(handed.grant, prompt(64), None)
    # Each renewal comes a third of the TTL after the last one, so nine of them outlast the TTL three times.
    wait_until(lambda: source.lease(handed.lease.lease_id).renewal_count >= 9)
    lease = source.lease(handed.lease.lease_id)
    assert lease.state == lease_pb2.LEASE_STATE_LIVE
    assert lease.age.ToNanoseconds() / 1e9 > 2.5 * ttl_s
    assert destination.get(pulled.transfer_id).waiting_for == transfer_pb2.WAITING_FOR_BLOCKS
    destination.give(pulled.transfer_id, target)
    assert destination.wait(pulled.transfer_id).state == SUCCEEDED
    assert destination.read(target) == written


def test_a_pull_that_waits_beyond_the_cap_fails_and_says_that_the_lease_is_gone(start: Start) -> None:
    source, destination = start((), (), settings="[limits]\nlease_cap_s = 0.6\n")
    handed = source.hand_over(prompt(16), ttl=dur(0.2))
    pulled = destination.pull(handed.grant, prompt(16), None)
    end = destination.wait(pulled.transfer_id)
    assert end.state == FAILED
    assert end.failure.reason in {EXPIRED, common_pb2.FAILURE_REASON_QUEUE_TIMEOUT}
    assert source.lease(handed.lease.lease_id).state == lease_pb2.LEASE_STATE_EXPIRED
