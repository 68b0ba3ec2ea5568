"""A router chooses an engine by GetEngine and WatchEngine, and an operator ends it with StartDrain."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from kvgrpc.service.engine_watchers import BEAT_S
from kvgrpc.v1 import admin_pb2, handshake_pb2, handshake_pb2_grpc, lease_pb2
from tests.service.api import refused
from tests.service.conftest import Start
from tests.service.engines import SUCCEEDED, Engine, unchanged, wait_until
from tests.service.values import dur, prompt

Reply = handshake_pb2.WatchEngineResponse
OPEN, DRAINING = handshake_pb2.ADMISSION_OPEN, handshake_pb2.ADMISSION_DRAINING
TOKENS = prompt(32)


@contextmanager
def watching(engine: Engine, interval_s: float = 0.0) -> Iterator[Iterator[Reply]]:
    """Yields the replies of a watch of this server."""
    with grpc.insecure_channel(engine.address) as channel:
        stub = handshake_pb2_grpc.HandshakeServiceStub(channel)
        request = handshake_pb2.WatchEngineRequest(min_interval=dur(interval_s))
        stream: Any = stub.WatchEngine(request, timeout=60)
        try:
            yield stream
        finally:
            stream.cancel()


def until(replies: Iterator[Reply], condition: Any) -> Reply:
    return next(reply for reply in replies if condition(reply.status))


def start_drain(engine: Engine, **fields: Any) -> admin_pb2.Drain:
    return engine.api.admin.StartDrain(admin_pb2.StartDrainRequest(**fields)).drain


def cancel_drain(engine: Engine) -> admin_pb2.Drain:
    return engine.api.admin.CancelDrain(admin_pb2.CancelDrainRequest()).drain


def test_an_engine_says_what_is_free_and_what_goes_on(source: Engine, destination: Engine) -> None:
    def status(engine: Engine) -> handshake_pb2.EngineStatus:
        return engine.api.handshake.GetEngine(handshake_pb2.GetEngineRequest()).status

    idle = status(source)
    (group,) = idle.groups
    assert (idle.admission, idle.admission_reason, idle.engine_attached) == (OPEN, "", False)
    assert (group.block_count, group.free_block_count, group.soft_block_count) == (520, 520, 0)
    assert (idle.transfer_count, idle.lease_count, idle.queued_bytes, idle.waiting_turn_count) == (0, 0, 0, 0)
    handed = source.hand_over(TOKENS)
    pulled = destination.pull(handed.grant, TOKENS, destination.allocate(2), after_step=1)
    now = status(source)
    assert (now.groups[0].free_block_count, now.transfer_count, now.lease_count) == (518, 1, 1)
    with watching(destination) as replies:
        waits = until(replies, lambda found: found.queued_bytes)
        assert waits.status.queued_bytes == 2 * 2048
    destination.cancel(pulled.transfer_id)


def test_a_watch_tells_the_present_at_once_and_then_what_changes(source: Engine) -> None:
    with watching(source) as replies:
        first = next(replies)
        assert (first.header.engine_id, first.status.lease_count) == (source.engine_id, 0)
        handed = source.hand_over(TOKENS)
        assert until(replies, lambda found: found.lease_count == 1).status.groups[0].free_block_count == 518
        source.release(handed.lease.lease_id)
        assert until(replies, lambda found: found.lease_count == 0).status.transfer_count == 0


def test_a_watch_of_an_idle_engine_tells_that_it_lives_and_nothing_else(source: Engine) -> None:
    with watching(source) as replies:
        first = next(replies)
        began = time.monotonic()
        second = next(replies)
    assert first.status == second.status
    assert time.monotonic() - began > BEAT_S / 2


def test_an_interval_is_not_negative(source: Engine) -> None:
    with pytest.raises(grpc.RpcError) as caught, watching(source, -1.0) as replies:
        next(replies)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_watch_ends_with_its_server(start: Start) -> None:
    (engine,) = start(())
    with watching(engine) as replies:
        next(replies)
        engine.process.kill()
        with pytest.raises(grpc.RpcError) as caught:
            list(replies)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_server_that_drains_takes_no_new_work_and_ends_what_has_begun(start: Start) -> None:
    source, destination = start((), ())
    handed = source.hand_over(TOKENS)
    with watching(source) as replies:
        answer = start_drain(source)
        assert (answer.admission, answer.transfer_count, answer.lease_count) == (DRAINING, 1, 1)
        assert answer.oldest_transfer_id == handed.transfer.transfer_id
        told = until(replies, lambda found: found.admission == DRAINING)
        assert told.status.admission_reason
        blocks = destination.allocate(2)
        with refused(source.api, "FAILED_PRECONDITION", "DRAINING"):
            source.allocate(1)
        refusal = source.api.refusal(lambda: source.allocate(1))
        assert (refusal.retry_delay_s, refusal.metadata["next"]) == (None, "RETRY_OTHER_CONSUMER")
        pulled = destination.pull(handed.grant, TOKENS, blocks)
        assert destination.wait(pulled.transfer_id).state == SUCCEEDED
        assert source.wait(handed.transfer.transfer_id).state == SUCCEEDED
        assert start_drain(source).transfer_count == 0
        assert cancel_drain(source).admission == OPEN
        until(replies, lambda found: found.admission == OPEN)
    assert source.allocate(1)


def test_asking_what_a_drain_would_wait_for_drains_nothing(source: Engine) -> None:
    handed = source.hand_over(TOKENS)
    with unchanged(source):
        answer = start_drain(source, validate_only=True)
    assert (answer.admission, answer.transfer_count, answer.lease_count) == (OPEN, 1, 1)
    ref = lease_pb2.LeaseRef(lease_id=handed.lease.lease_id)
    source.api.leases.ReleaseLease(lease_pb2.ReleaseLeaseRequest(lease=ref))


def get_drain(engine: Engine, **fields: Any) -> admin_pb2.Drain:
    return engine.api.admin.GetDrain(admin_pb2.GetDrainRequest(**fields)).drain


def test_what_a_drain_waits_for_is_named_with_its_owner_and_deadline_oldest_first(start: Start) -> None:
    source, destination = start((), ())
    handed = source.hand_over(TOKENS, request_id="r-1")
    pulled = destination.pull(handed.grant, TOKENS, None, request_id="r-2")
    start_drain(source, reason="a new kernel")
    wait_until(lambda: any(row.reader_engine_ids for row in get_drain(source).blockers))
    found = get_drain(source)
    assert (found.reason, found.HasField("age"), found.blocker_count) == ("a new kernel", True, 2)
    lease, transfer = sorted(found.blockers, key=lambda row: str(row.WhichOneof("work")))
    assert (transfer.transfer.transfer_id, transfer.transfer.request_id) == (handed.transfer.transfer_id, "r-1")
    assert (lease.lease.lease_id, lease.owner, transfer.owner) == (handed.lease.lease_id, "anonymous", "anonymous")
    assert list(lease.reader_engine_ids) == [destination.engine_id]
    assert all(row.HasField("remaining") for row in found.blockers)
    (row,) = get_drain(destination).blockers
    assert (row.transfer.transfer_id, row.transfer.peer.engine_id) == (pulled.transfer_id, source.engine_id)
    assert row.HasField("remaining")
    assert not get_drain(destination).HasField("age")
    destination.cancel(pulled.transfer_id)


def test_rows_of_a_drain_are_bounded_and_all_are_counted(source: Engine) -> None:
    first = source.hand_over(TOKENS)
    for _ in range(3):
        source.hand_over(TOKENS)
    found = get_drain(source, page_size=2)
    assert (len(found.blockers), found.blocker_count, found.transfer_count, found.lease_count) == (2, 8, 4, 4)
    ids = {row.transfer.transfer_id or row.lease.lease_id for row in found.blockers}
    assert ids == {first.transfer.transfer_id, first.lease.lease_id}
    source.reset()


def test_capabilities_say_whether_work_is_taken(start: Start) -> None:
    (engine,) = start(())
    request = handshake_pb2.GetCapabilitiesRequest()
    assert engine.api.handshake.GetCapabilities(request).admission == OPEN
    start_drain(engine)
    found = engine.api.handshake.GetCapabilities(request)
    assert found.admission == DRAINING
    assert found.admission_reason
