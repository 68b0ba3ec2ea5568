"""CancelTransfer works at any time, from either side, and its answer says what is known of the memory."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvgrpc.v1 import admin_pb2, common_pb2, handoff_pb2, lease_pb2, pool_pb2, transfer_pb2
from tests.service.api import refused
from tests.service.conftest import SETTINGS, SHARED
from tests.service.engines import (
    CANCELLED,
    FAILED,
    QUARANTINED,
    RETURNED,
    SUCCEEDED,
    Engine,
    ServeProcess,
    unchanged,
    wait_until,
)
from tests.service.values import content, new_key, prompt

BEFORE = transfer_pb2.CANCEL_OUTCOME_CANCELLED_BEFORE_ACCESS
IN_FLIGHT = transfer_pb2.CANCEL_OUTCOME_CANCELLED_IN_FLIGHT
ENDED = transfer_pb2.CANCEL_OUTCOME_ALREADY_ENDED
TOMBSTONED = transfer_pb2.CANCEL_OUTCOME_TOMBSTONED
ACTIVE = transfer_pb2.TRANSFER_STATE_ACTIVE
BYTES_PER_S = 60_000
"""Bandwidth limit in bytes per second. 16 blocks take half a second, so that a test can act in between."""


@pytest.fixture(scope="module")
def shared_slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    flags = (*SHARED, "--bandwidth-limit-bytes-per-s", str(BYTES_PER_S))
    engine = Engine(ServeProcess(tmp_path_factory.mktemp("slow"), *flags, settings=SETTINGS))
    yield engine
    engine.close()


@pytest.fixture
def slow(shared_slow: Engine, source: Engine) -> Iterator[Engine]:
    """Yields a destination whose bytes move slowly."""
    yield shared_slow
    shared_slow.reset()


def cancel_key(engine: Engine, key: bytes, message: str = "") -> transfer_pb2.CancelTransferResponse:
    request = transfer_pb2.CancelTransferRequest(transfer_key=key, message=message)
    return engine.api.transfers.CancelTransfer(request)


def test_a_hand_over_without_readers_is_cancelled_before_access(source: Engine) -> None:
    blocks = source.allocate(2)
    handed = source.hand_over(prompt(32), blocks)
    reply = source.cancel(handed.transfer.transfer_id, "the client went away")
    assert reply.outcome == BEFORE
    (ended,) = reply.transfers
    assert (ended.state, ended.memory) == (CANCELLED, RETURNED)
    assert source.lease(handed.lease.lease_id).state == lease_pb2.LEASE_STATE_RELEASED
    assert sorted(source.free(blocks)) == blocks


DONE, LIVE = lease_pb2.LEASE_STATE_DONE, lease_pb2.LEASE_STATE_LIVE


@pytest.mark.parametrize(
    ("on_abort", "scope", "lease", "send"),
    [
        (common_pb2.ON_ABORT_UNSPECIFIED, transfer_pb2.CANCEL_SCOPE_UNSPECIFIED, DONE, CANCELLED),
        (common_pb2.ON_ABORT_RELEASE, transfer_pb2.CANCEL_SCOPE_BOTH, DONE, CANCELLED),
        (common_pb2.ON_ABORT_KEEP, transfer_pb2.CANCEL_SCOPE_BOTH, DONE, CANCELLED),
        (common_pb2.ON_ABORT_RELEASE, transfer_pb2.CANCEL_SCOPE_THIS_SIDE, LIVE, ACTIVE),
        (common_pb2.ON_ABORT_KEEP, transfer_pb2.CANCEL_SCOPE_THIS_SIDE, LIVE, ACTIVE),
        (common_pb2.ON_ABORT_RELEASE, transfer_pb2.CANCEL_SCOPE_ON_ABORT, DONE, CANCELLED),
        (common_pb2.ON_ABORT_KEEP, transfer_pb2.CANCEL_SCOPE_ON_ABORT, LIVE, ACTIVE),
    ],
)
def test_a_cancel_reaches_the_source_in_its_scope(
    source: Engine, destination: Engine, on_abort: int, scope: int, lease: int, send: int
) -> None:
    tokens = prompt(16)
    handed = source.hand_over(tokens, on_abort=on_abort)
    lease_id = handed.lease.lease_id
    pulled = destination.pull(handed.grant, tokens, None)
    wait_until(lambda: source.lease(lease_id).open_access_count == 1)
    reply = destination.cancel(pulled.transfer_id, scope=scope)
    assert reply.outcome == BEFORE
    assert [(t.state, t.memory) for t in reply.transfers] == [(CANCELLED, RETURNED)]
    wait_until(lambda: source.lease(lease_id).open_access_count == 0)
    assert source.lease(lease_id).state == lease
    assert source.get(handed.transfer.transfer_id).state == send


def test_a_kept_offer_serves_the_next_consumer(source: Engine, destination: Engine, slow: Engine) -> None:
    tokens = prompt(16)
    blocks = source.allocate(1)
    written = source.write(blocks, seed=5)
    handed = source.hand_over(tokens, blocks, on_abort=common_pb2.ON_ABORT_KEEP)
    given_up = destination.pull(handed.grant, tokens, None)
    destination.cancel(given_up.transfer_id, scope=transfer_pb2.CANCEL_SCOPE_ON_ABORT)
    target = slow.allocate(1)
    assert slow.wait(slow.pull(handed.grant, tokens, target).transfer_id).state == SUCCEEDED
    assert slow.read(target) == written


def test_a_cancel_in_flight_quarantines_the_blocks_until_the_bytes_are_at_rest(source: Engine, slow: Engine) -> None:
    tokens = prompt(256)
    handed = source.hand_over(tokens)
    target = slow.allocate(16)
    pulled = slow.pull(handed.grant, tokens, target)
    wait_until(lambda: slow.get(pulled.transfer_id).state == ACTIVE)
    reply = slow.cancel(pulled.transfer_id, "enough")
    assert reply.outcome == IN_FLIGHT
    (ended,) = reply.transfers
    assert (ended.state, ended.memory) == (CANCELLED, QUARANTINED)
    assert (ended.failure.reason, ended.failure.phase) == (
        common_pb2.FAILURE_REASON_CANCELLED,
        common_pb2.TRANSFER_PHASE_WIRE,
    )
    assert ended.failure.message == "enough"
    (pin,) = slow.pins()
    assert (pin.kind, pin.owner) == (admin_pb2.PIN_KIND_QUARANTINE, pulled.transfer_id)
    assert pin.missing_proof
    drain = slow.api.admin.GetDrain(admin_pb2.GetDrainRequest()).drain
    (row,) = drain.blockers
    assert (row.pin.owner, row.pin.missing_proof, row.owner) == (pin.owner, pin.missing_proof, "anonymous")
    assert (drain.quarantined_block_count, drain.transfer_count, drain.HasField("age")) == (16, 0, False)
    assert (slow.counts().quarantined_block_count, slow.counts().target_block_count) == (16, 0)
    assert slow.free(target) == [], "a quarantined block is not free"
    end = slow.wait(pulled.transfer_id, returned=False)
    assert (end.state, end.memory) == (CANCELLED, QUARANTINED)
    assert slow.wait(pulled.transfer_id, returned=True).memory == RETURNED
    assert slow.counts().free_block_count == slow.counts().block_count


def test_quarantined_blocks_take_no_other_bytes(source: Engine, slow: Engine) -> None:
    tokens = prompt(256)
    handed = source.hand_over(tokens, on_abort=common_pb2.ON_ABORT_KEEP)
    target = slow.allocate(16)
    pulled = slow.pull(handed.grant, tokens, target)
    wait_until(lambda: slow.get(pulled.transfer_id).state == ACTIVE)
    slow.cancel(pulled.transfer_id, scope=transfer_pb2.CANCEL_SCOPE_THIS_SIDE)
    with refused(slow.api, "FAILED_PRECONDITION", "BLOCK_PINNED"):
        slow.pull(handed.grant, tokens, target)
    with refused(slow.api, "FAILED_PRECONDITION", "BLOCK_PINNED"):
        slow.hand_over(tokens, target)
    slow.wait(pulled.transfer_id, returned=True)
    again = slow.pull(handed.grant, tokens, target)
    assert slow.wait(again.transfer_id).state == SUCCEEDED


def test_a_source_that_is_cancelled_ends_the_pull_cancelled_too(source: Engine, slow: Engine) -> None:
    tokens = prompt(256)
    handed = source.hand_over(tokens)
    pulled = slow.pull(handed.grant, tokens, slow.allocate(16))
    wait_until(lambda: slow.get(pulled.transfer_id).state == ACTIVE)
    assert source.cancel(handed.transfer.transfer_id, "nobody waits").transfers[0].memory == RETURNED
    end = slow.wait(pulled.transfer_id)
    assert (end.state, end.failure.reason) == (CANCELLED, common_pb2.FAILURE_REASON_CANCELLED)
    assert "nobody waits" in end.failure.message


def test_a_source_that_takes_its_blocks_back_makes_the_pull_fail(source: Engine, slow: Engine) -> None:
    tokens = prompt(256)
    handed = source.hand_over(tokens)
    pulled = slow.pull(handed.grant, tokens, slow.allocate(16))
    wait_until(lambda: slow.get(pulled.transfer_id).state == ACTIVE)
    source.cancel(handed.transfer.transfer_id, scope=transfer_pb2.CANCEL_SCOPE_THIS_SIDE)
    end = slow.wait(pulled.transfer_id)
    assert (end.state, end.failure.reason) == (FAILED, common_pb2.FAILURE_REASON_LEASE_RELEASED)


def test_a_request_that_is_over_may_be_tried_again_under_its_key(source: Engine, destination: Engine) -> None:
    tokens, key = prompt(16), new_key()
    handed = source.hand_over(tokens, transfer_key=key)
    pulled = destination.pull(handed.grant, tokens, destination.allocate(1))
    destination.wait(pulled.transfer_id)
    source.wait(handed.transfer.transfer_id)
    for engine in (source, destination):
        assert cancel_key(engine, key).outcome == ENDED
    again = source.hand_over(tokens, transfer_key=key)
    pulled = destination.pull(again.grant, tokens, destination.allocate(1))
    assert destination.wait(pulled.transfer_id).state == SUCCEEDED


def test_a_cancel_frees_allocations_and_passes_over_those_that_are_gone(source: Engine) -> None:
    counts = [pool_pb2.GroupBlockCount(block_count=2)]
    allocated = source.api.pool.AllocateBlocks(pool_pb2.AllocateBlocksRequest(group_block_counts=counts)).blocks
    handed = source.hand_over(prompt(32), [], blocks=allocated)
    ids = [allocated.allocation_id, "b-0000000000000000-1"]
    request = transfer_pb2.CancelTransferRequest(transfer_id=handed.transfer.transfer_id, free_allocation_ids=ids)
    assert source.api.transfers.CancelTransfer(request).outcome == BEFORE
    assert source.counts().free_block_count == source.counts().block_count


def test_asking_what_a_cancel_would_find_cancels_nothing(source: Engine) -> None:
    handed = source.hand_over(prompt(16))
    with unchanged(source):
        assert source.cancel(handed.transfer.transfer_id, validate_only=True).outcome == BEFORE
    assert source.cancel(handed.transfer.transfer_id).outcome == BEFORE


def test_a_cancel_after_the_end_changes_nothing(source: Engine, destination: Engine) -> None:
    tokens = prompt(16)
    handed = source.hand_over(tokens)
    pulled = destination.pull(handed.grant, tokens, destination.allocate(1))
    destination.wait(pulled.transfer_id)
    source.wait(handed.transfer.transfer_id)
    with unchanged(source, destination):
        for engine, id_ in ((destination, pulled.transfer_id), (source, handed.transfer.transfer_id)):
            reply = engine.cancel(id_, "too late")
            assert reply.outcome == ENDED
            assert [t.state for t in reply.transfers] == [SUCCEEDED]


def test_cancelling_twice_finds_it_ended(source: Engine) -> None:
    handed = source.hand_over(prompt(16))
    assert source.cancel(handed.transfer.transfer_id).outcome == BEFORE
    assert source.cancel(handed.transfer.transfer_id).outcome == ENDED


def test_a_key_cancels_all_transfers_that_have_it(source: Engine, destination: Engine) -> None:
    tokens, key = prompt(16), new_key()
    handed = source.hand_over(tokens, transfer_key=key)
    pulls = [destination.pull(handed.grant, tokens, None) for _ in range(2)]
    reply = cancel_key(destination, key)
    assert reply.outcome == BEFORE
    assert {t.transfer_id for t in reply.transfers} == {pull.transfer_id for pull in pulls}
    assert {t.state for t in reply.transfers} == {CANCELLED}


def test_a_key_that_is_cancelled_first_refuses_its_transfer_when_it_comes(source: Engine, destination: Engine) -> None:
    tokens, key = prompt(16), new_key()
    handed = source.hand_over(tokens, transfer_key=key)
    reply = cancel_key(destination, key, "nobody waits for it")
    assert (reply.outcome, len(reply.transfers)) == (TOMBSTONED, 0)
    blocks = destination.allocate(1)
    with unchanged(source, destination):
        refusal = destination.api.refusal(lambda: destination.pull(handed.grant, tokens, blocks))
        assert (refusal.code, refusal.reason) == ("FAILED_PRECONDITION", "CANCELLED")
        assert "nobody waits for it" in refusal.message
        refusal = destination.api.refusal(lambda: destination.hand_over(tokens, blocks, transfer_key=key))
        assert (refusal.code, refusal.reason) == ("FAILED_PRECONDITION", "CANCELLED")


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        pytest.param({"transfer_id": ""}, "INVALID_ARGUMENT", "INVALID_FIELD", id="empty-id"),
        pytest.param({"transfer_key": b"short"}, "INVALID_ARGUMENT", "INVALID_FIELD", id="short-key"),
        pytest.param({"transfer_id": "t-0-1"}, "NOT_FOUND", "TRANSFER_NOT_FOUND", id="unknown-id"),
    ],
)
def test_a_cancel_of_no_transfer_is_refused(source: Engine, fields: dict[str, Any], code: str, reason: str) -> None:
    with unchanged(source), refused(source.api, code, reason):
        source.api.transfers.CancelTransfer(transfer_pb2.CancelTransferRequest(**fields))


def test_a_pull_is_not_given_blocks_after_its_end(source: Engine, destination: Engine) -> None:
    tokens = prompt(16)
    handed = source.hand_over(tokens)
    pulled = destination.pull(handed.grant, tokens, None)
    destination.cancel(pulled.transfer_id)
    source.wait(handed.transfer.transfer_id)
    blocks = destination.allocate(1)
    with unchanged(source, destination), refused(destination.api, "FAILED_PRECONDITION", "TRANSFER_ENDED"):
        destination.give(pulled.transfer_id, blocks)


def test_a_refused_pull_leaves_the_offer_to_others(source: Engine, destination: Engine) -> None:
    tokens = prompt(16)
    handed = source.hand_over(tokens)
    request = handoff_pb2.PullBlocksRequest(
        grant=handed.grant,
        content=content(tokens),
        destination=destination.into([0, 1, 2]),
    )
    with unchanged(source, destination), refused(destination.api, "INVALID_ARGUMENT", "BLOCK_COUNT_MISMATCH"):
        destination.api.handoff.PullBlocks(request)
    pulled = destination.pull(handed.grant, tokens, destination.allocate(1))
    assert destination.wait(pulled.transfer_id).state == SUCCEEDED
