"""A side of a transfer dies or stands still: the other side notices in time, and no block is lost."""

import signal
import time

import pytest

from kvgrpc.v1 import admin_pb2, common_pb2, handshake_pb2, lease_pb2, transfer_pb2
from tests.e2e.slow_pulls import (
    BLOCKS,
    LIMITS,
    SLOW,
    TOKENS,
    begin_slow_pull,
    check_a_good_pull,
    limits,
    wait_active,
)
from tests.service.conftest import Start
from tests.service.engines import FAILED, QUARANTINED, RETURNED, SUCCEEDED, Engine, meet, wait_until

DEAD = handshake_pb2.PEER_STATE_DEAD
CONNECTED = handshake_pb2.PEER_STATE_CONNECTED
SUSPECT = handshake_pb2.PEER_STATE_SUSPECT
PATIENT_GRACE_S = 20.0
PATIENT = limits(peer_grace_s=PATIENT_GRACE_S)
BEAT_S = 3.0
"""Time in seconds that is shorter than the interval between two beats at this grace."""


def peer_states(engine: Engine) -> list[int]:
    return [peer.state for peer in engine.api.admin.ListPeers(admin_pb2.ListPeersRequest()).peers]


def all_free(engine: Engine) -> bool:
    counts = engine.counts()
    return counts.pinned_block_count == 0


@pytest.mark.parametrize("data_path", ["shm", "nixl"])
def test_a_source_that_is_killed_while_it_is_read_fails_the_pull_in_time(start: Start, data_path: str) -> None:
    paths = ("--data-paths", data_path)
    source, destination = start(paths, (*paths, *SLOW), settings=LIMITS)
    _, pulled = begin_slow_pull(source, destination)
    source.process.kill()
    end = destination.wait(pulled.transfer_id)
    assert (end.state, end.memory) == (FAILED, RETURNED)
    assert end.failure.reason in {
        common_pb2.FAILURE_REASON_PEER_LOST,
        common_pb2.FAILURE_REASON_DATA_PATH_FAILED,
        common_pb2.FAILURE_REASON_SETTLE_TIMEOUT,
    }
    assert all_free(destination)
    wait_until(lambda: peer_states(destination) == [DEAD])


@pytest.mark.parametrize("data_path", ["shm", "cma"])
def test_a_source_killed_on_the_same_host_is_lost_long_before_the_grace_ends(start: Start, data_path: str) -> None:
    paths = ("--data-paths", data_path)
    settings = limits(peer_grace_s=PATIENT_GRACE_S, transfer_timeout_s=60.0)
    source, destination = start(paths, (*paths, "--bandwidth-limit-bytes-per-s", "1000"), settings=settings)
    _, pulled = begin_slow_pull(source, destination)
    source.process.kill()
    killed = time.monotonic()
    end = destination.wait(pulled.transfer_id, returned=False)
    assert (end.state, end.failure.reason) == (FAILED, common_pb2.FAILURE_REASON_PEER_LOST)
    assert peer_states(destination) == [DEAD]
    assert time.monotonic() - killed < PATIENT_GRACE_S / 2


def test_a_source_that_is_killed_is_noticed_before_its_next_beat_is_due(start: Start) -> None:
    source, destination = start((), (), settings=PATIENT)
    meet(source, destination)
    check_a_good_pull(source, destination)
    source.process.kill()
    # It is suspect until its death is proved, which may be at once.
    wait_until(lambda: peer_states(destination)[0] in (SUSPECT, DEAD), BEAT_S)


def test_a_source_that_dies_while_a_pull_waits_fails_it(start: Start) -> None:
    source, destination = start((), (), settings=LIMITS)
    meet(source, destination)
    pulled = destination.pull(source.hand_over(TOKENS).grant, TOKENS, None)
    wait_until(lambda: destination.get(pulled.transfer_id).waiting_for == transfer_pb2.WAITING_FOR_BLOCKS)
    source.process.kill()
    end = destination.wait(pulled.transfer_id)
    assert end.failure.reason == common_pb2.FAILURE_REASON_PEER_LOST
    assert end.failure.phase == common_pb2.TRANSFER_PHASE_QUEUE


@pytest.mark.parametrize(
    ("on_abort", "lease_state"),
    [
        (common_pb2.ON_ABORT_RELEASE, lease_pb2.LEASE_STATE_DONE),
        (common_pb2.ON_ABORT_KEEP, lease_pb2.LEASE_STATE_LIVE),
    ],
)
def test_a_killed_consumer_loses_its_access_after_the_grace(start: Start, on_abort: int, lease_state: int) -> None:
    source, destination = start((), SLOW, settings=LIMITS)
    lease_id, _ = begin_slow_pull(source, destination, on_abort=on_abort)
    assert source.lease(lease_id).open_access_count == 1
    destination.process.kill()
    wait_until(lambda: source.lease(lease_id).open_access_count == 0)
    assert source.lease(lease_id).state == lease_state
    assert peer_states(source) == [DEAD]
    assert all_free(source) is (lease_state == lease_pb2.LEASE_STATE_DONE)


def restart(start: Start, engine: Engine, *flags: str) -> Engine:
    """Restarts the engine in a new life, with the same engine id and address."""
    (again,) = start(("--listen", engine.address, "--engine-id", engine.engine_id, *flags), settings=PATIENT)
    assert (again.address, again.engine_id) == (engine.address, engine.engine_id)
    return again


def test_a_grant_of_an_earlier_life_is_refused_and_a_new_one_works(start: Start) -> None:
    source, destination = start(("--engine-id", "p"), (), settings=PATIENT)
    meet(source, destination)
    check_a_good_pull(source, destination)
    old = source.hand_over(TOKENS).grant
    source.process.kill()
    source = restart(start, source)
    target = destination.allocate(BLOCKS)
    end = destination.wait(destination.pull(old, TOKENS, target).transfer_id)
    assert (end.state, end.memory) == (FAILED, RETURNED)
    assert end.failure.reason == common_pb2.FAILURE_REASON_INCARNATION_CHANGED
    assert end.failure.next == common_pb2.NEXT_STEP_RECOMPUTE
    check_a_good_pull(source, destination)
    states = peer_states(destination)
    assert states[0] == CONNECTED
    assert set(states[1:]) == {DEAD}
    request = lease_pb2.GetLeaseRequest(lease=lease_pb2.LeaseRef(grant=old))
    refusal = source.api.refusal(lambda: source.api.leases.GetLease(request))
    assert (refusal.code, refusal.reason) == ("ABORTED", "INCARNATION_CHANGED")


def test_a_source_that_restarts_while_it_is_read_is_not_believed(start: Start) -> None:
    source, destination = start(("--engine-id", "p"), SLOW, settings=LIMITS)
    _, pulled = begin_slow_pull(source, destination)
    source.process.kill()
    restart(start, source)
    end = destination.wait(pulled.transfer_id)
    assert end.state == FAILED
    assert end.failure.reason in {
        common_pb2.FAILURE_REASON_INCARNATION_CHANGED,
        common_pb2.FAILURE_REASON_PEER_LOST,
        common_pb2.FAILURE_REASON_SETTLE_TIMEOUT,
    }


# ---- a stopped process holds its connections and answers nothing


def test_a_source_that_is_stopped_before_the_handshake_is_unreachable(start: Start) -> None:
    source, destination = start((), (), settings=limits(connect_timeout_s=1.0))
    grant = source.hand_over(TOKENS).grant
    with source.process.stopped():
        pulled = destination.pull(grant, TOKENS, destination.allocate(BLOCKS))
        end = destination.wait(pulled.transfer_id)
    assert end.failure.reason == common_pb2.FAILURE_REASON_PEER_UNREACHABLE
    assert end.failure.phase == common_pb2.TRANSFER_PHASE_HANDSHAKE
    assert end.failure.next == common_pb2.NEXT_STEP_RETRY_OTHER_CONSUMER
    assert all_free(destination)
    meet(source, destination)
    check_a_good_pull(source, destination)


def test_a_pull_from_a_source_that_is_stopped_at_the_opening_fails(start: Start) -> None:
    source, destination = start((), (), settings=LIMITS)
    meet(source, destination)
    check_a_good_pull(source, destination)
    handed = source.hand_over(TOKENS)
    with source.process.stopped():
        pulled = destination.pull(handed.grant, TOKENS, destination.allocate(BLOCKS))
        end = destination.wait(pulled.transfer_id)
    assert end.failure.reason in {
        common_pb2.FAILURE_REASON_QUEUE_TIMEOUT,
        common_pb2.FAILURE_REASON_PEER_LOST,
        common_pb2.FAILURE_REASON_PEER_UNREACHABLE,
    }
    assert all_free(destination)
    wait_until(lambda: source.lease(handed.lease.lease_id).open_access_count == 0)
    check_a_good_pull(source, destination)


def test_without_the_verdict_of_a_stopped_source_a_pull_fails(start: Start) -> None:
    source, destination = start((), SLOW, settings=PATIENT)
    _, pulled = begin_slow_pull(source, destination)
    with source.process.stopped():
        end = destination.wait(pulled.transfer_id)
    assert (end.state, end.failure.phase) == (FAILED, common_pb2.TRANSFER_PHASE_SETTLE)
    assert end.failure.reason == common_pb2.FAILURE_REASON_SETTLE_TIMEOUT
    check_a_good_pull(source, destination)


def test_blocks_stay_in_quarantine_until_a_nixl_read_from_a_stopped_source_ends(start: Start) -> None:
    paths = ("--data-paths", "nixl")
    settings = limits(transfer_timeout_s=2.0)
    source, destination = start(paths, (*paths, *SLOW), settings=settings, UCX_TLS="tcp")
    meet(source, destination)
    check_a_good_pull(source, destination)
    with source.process.stopped():
        pass
    _, pulled = begin_slow_pull(source, destination)
    with source.process.stopped():
        end = destination.wait(pulled.transfer_id, returned=False)
        assert end.state == FAILED
        assert end.failure.reason in {
            common_pb2.FAILURE_REASON_TRANSFER_TIMEOUT,
            common_pb2.FAILURE_REASON_PEER_LOST,
        }
        assert destination.get(pulled.transfer_id).memory == QUARANTINED
        (pin,) = destination.pins()
        assert pin.kind == admin_pb2.PIN_KIND_QUARANTINE
    assert destination.wait(pulled.transfer_id).memory == RETURNED
    assert all_free(destination)
    check_a_good_pull(source, destination)


def test_a_cancel_reaches_a_source_that_stood_still(start: Start) -> None:
    source, destination = start((), (), settings=PATIENT)
    meet(source, destination)
    handed = source.hand_over(TOKENS)
    pulled = destination.pull(handed.grant, TOKENS, None)
    wait_until(lambda: destination.get(pulled.transfer_id).waiting_for == transfer_pb2.WAITING_FOR_BLOCKS)
    with source.process.stopped():
        assert destination.cancel(pulled.transfer_id).transfers[0].memory == RETURNED
    assert source.wait(handed.transfer.transfer_id).state == transfer_pb2.TRANSFER_STATE_CANCELLED


def test_a_consumer_that_stood_still_beyond_the_grace_never_gets_a_valid_verdict(start: Start) -> None:
    source, destination = start((), SLOW, settings=LIMITS)
    lease_id, pulled = begin_slow_pull(source, destination, on_abort=common_pb2.ON_ABORT_KEEP)
    with destination.process.stopped():
        wait_until(lambda: source.lease(lease_id).open_access_count == 0)
        source.release(lease_id)
    end = destination.wait(pulled.transfer_id)
    assert (end.state, end.memory) == (FAILED, RETURNED)
    check_a_good_pull(source, destination)


def test_a_server_that_is_told_to_end_lets_a_transfer_finish_and_exits_with_0(start: Start) -> None:
    source, destination = start(("--drain-s", "15"), SLOW, settings=LIMITS)
    meet(source, destination)
    blocks, target = source.allocate(BLOCKS), destination.allocate(BLOCKS)
    written = source.write(blocks, seed=3)
    grant = source.hand_over(TOKENS, blocks).grant
    pulled = destination.pull(grant, TOKENS, target)
    wait_active(destination, pulled.transfer_id)
    source.process.signal(signal.SIGTERM)
    assert destination.wait(pulled.transfer_id).state == SUCCEEDED
    assert destination.read(target) == written
    assert source.process.wait_exit() == 0
