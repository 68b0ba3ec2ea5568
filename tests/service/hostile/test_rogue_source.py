"""A pull from a source that breaks the protocol: a typed failure in time, no block lost, and the server goes on."""

from typing import Any

import grpc
import pytest

from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import common_pb2, handoff_pb2, lease_pb2, transfer_pb2
from tests.service.conftest import SETTINGS
from tests.service.engines import (
    FAILED,
    RETURNED,
    SUCCEEDED,
    Engine,
    memory_unchanged,
    wait_until,
)
from tests.service.footprint import resident_bytes
from tests.service.rogue import BLOCKS, Abort, Change, Rogue, abort, garbage, too_late
from tests.service.values import content, dur, group, phase_name, prompt

TOKENS = prompt(40)
SHORT = (
    SETTINGS
    + """
queue_timeout_s = 1.5
transfer_timeout_s = 10.0
settle_timeout_s = 1.0
connect_timeout_s = 1.0
"""
)


@pytest.fixture(scope="module")
def victim_settings() -> str:
    return SHORT


def pull_fails(victim: Engine, rogue: Rogue) -> tuple[str, str]:
    """Returns (reason, phase) of a pull that must fail. Its blocks come back, unchanged unless its settle failed."""
    target = victim.allocate(3)
    before = victim.write(target, seed=1)
    with memory_unchanged(victim):
        pulled = victim.pull(rogue.grant(40), TOKENS, target)
        end = victim.wait(pulled.transfer_id)
    assert (end.state, end.memory) == (FAILED, RETURNED)
    if end.failure.phase != common_pb2.TRANSFER_PHASE_SETTLE:
        assert victim.read(target) == before
    return common_pb2.FailureReason.Name(end.failure.reason).removeprefix("FAILURE_REASON_"), phase_name(
        end.failure.phase
    )


def test_a_source_of_another_make_that_keeps_to_the_protocol_is_pulled_from(victim: Engine, rogue: Rogue) -> None:
    pulled = victim.pull(rogue.grant(40), TOKENS, victim.allocate(3))
    end = victim.wait(pulled.transfer_id)
    assert (end.state, end.peer.transfer_id) == (SUCCEEDED, "t-rogue")


def test_without_an_exporter_the_trace_context_passes_through_to_the_source(victim: Engine, rogue: Rogue) -> None:
    traceparent = f"00-{'4b' * 16}-{'7a' * 8}-01"
    request = handoff_pb2.PullBlocksRequest(
        grant=rogue.grant(40), content=content(TOKENS), destination=victim.into(victim.allocate(3))
    )
    pulled = victim.api.handoff.PullBlocks(request, metadata=(("traceparent", traceparent),)).transfer
    assert victim.wait(pulled.transfer_id).trace_id == "4b" * 16
    for rpc in ("Handshake", "OpenAccess", "SettleAccess"):
        assert rogue.traceparents[rpc] == traceparent, rpc


@pytest.mark.parametrize(
    ("rpc", "phase"), [("Handshake", "handshake"), ("OpenAccess", "open"), ("SettleAccess", "settle")]
)
def test_an_unreadable_answer_fails_the_pull_at_once(victim: Engine, rogue: Rogue, rpc: str, phase: str) -> None:
    rogue.changes[rpc] = garbage
    assert pull_fails(victim, rogue) == ("PEER_FAILED", phase)
    assert rogue.calls[rpc] == 1
    victim.process.check_log()


def test_answers_that_make_no_sense_keep_no_memory(victim: Engine, rogue: Rogue) -> None:
    def two_rows(reply: peer_pb2.SettleAccessResponse) -> None:
        reply.results.add(message="x" * 1_000_000)

    rogue.changes["SettleAccess"] = two_rows
    for _ in range(10):  # each later answer reuses the memory of such an answer
        assert pull_fails(victim, rogue) == ("PEER_FAILED", "settle")
    before = resident_bytes(victim.process.pid)
    for _ in range(40):
        pull_fails(victim, rogue)
    assert resident_bytes(victim.process.pid) - before < 20_000_000


def test_a_close_whose_answer_cannot_be_read_is_sent_again(victim: Engine, rogue: Rogue) -> None:
    rogue.changes["SettleAccess"] = rogue.changes["CloseAccess"] = garbage
    assert pull_fails(victim, rogue) == ("PEER_FAILED", "settle")
    wait_until(lambda: rogue.calls.get("CloseAccess", 0) > 1)


def opened(**fields: Any) -> Change:
    """Returns a change of the first row of OpenAccess."""

    def change(reply: peer_pb2.OpenAccessResponse) -> None:
        row = reply.results[0]
        for name, value in fields.items():
            row.ClearField(name)  # type: ignore[arg-type]
            if value is not None:
                row.MergeFrom(peer_pb2.OpenedAccess(**{name: value}))

    return change


def rows(count: int) -> Change:
    def change(reply: Any) -> None:
        row = type(reply.results[0])()
        row.CopyFrom(reply.results[0])
        del reply.results[:]
        reply.results.extend([row] * count)

    return change


def runs(starts: list[int], counts: list[int]) -> list[common_pb2.GroupBlocks]:
    return [common_pb2.GroupBlocks(runs=common_pb2.BlockRuns(starts=starts, counts=counts))]


BAD_OPENINGS = {
    "no row": rows(0),
    "two rows": rows(2),
    "an empty row": opened(blocks=None, token_count=None, ttl=None, remaining=None),
    "more blocks": opened(blocks=[group([*BLOCKS, 6])]),
    "blocks that its pool does not have": opened(blocks=[group([3, 4, 520])]),
    "runs without counts": opened(blocks=runs([3, 4, 5], [1])),
    "a million blocks": opened(blocks=runs([0], [1_000_000])),
    "negative time left": opened(remaining=dur(-1)),
}


@pytest.mark.parametrize("case", BAD_OPENINGS)
def test_an_opening_that_makes_no_sense_fails_the_pull(victim: Engine, rogue: Rogue, case: str) -> None:
    rogue.changes["OpenAccess"] = BAD_OPENINGS[case]
    assert pull_fails(victim, rogue) == ("PEER_FAILED", "open")


@pytest.mark.parametrize(
    ("code", "reason"), [(common_pb2.FAILURE_REASON_LEASE_EXPIRED, "LEASE_EXPIRED"), (7777, "INTERNAL")]
)
def test_a_refused_opening_fails_with_its_reason(victim: Engine, rogue: Rogue, code: int, reason: str) -> None:
    failure = common_pb2.Failure(reason=code, message="no")  # type: ignore[arg-type]
    rogue.changes["OpenAccess"] = opened(failure=failure)
    assert pull_fails(victim, rogue) == (reason, "open")


def test_a_source_that_waits_longer_than_an_opening_may_is_asked_again(victim: Engine, rogue: Rogue) -> None:
    """It may wait for its engine's step, for example, until the queue timeout of the pull."""
    deadline = common_pb2.Failure(reason=common_pb2.FAILURE_REASON_DEADLINE, message="waited too long for: step")
    too_long = [opened(failure=deadline)] * 2

    def change(reply: peer_pb2.OpenAccessResponse) -> None:
        if too_long:
            too_long.pop()(reply)

    rogue.changes["OpenAccess"] = change
    pulled = victim.pull(rogue.grant(40), TOKENS, victim.allocate(3))
    assert victim.wait(pulled.transfer_id).state == SUCCEEDED
    assert rogue.calls["OpenAccess"] == 3


@pytest.mark.parametrize("rpc", ["Handshake", "OpenAccess", "SettleAccess"])
def test_a_status_with_broken_details_is_a_failure(victim: Engine, rogue: Rogue, rpc: str) -> None:
    rogue.changes[rpc] = abort(grpc.StatusCode.FAILED_PRECONDITION, ("grpc-status-details-bin", b"\xff\xff\xff"))
    reason, _ = pull_fails(victim, rogue)
    assert reason == "PEER_FAILED"


@pytest.mark.parametrize(
    ("code", "reasons"),
    [
        (grpc.StatusCode.INTERNAL, {"PEER_FAILED"}),
        (grpc.StatusCode.CANCELLED, {"PEER_FAILED", "PEER_UNREACHABLE"}),
        (grpc.StatusCode.UNAVAILABLE, {"QUEUE_TIMEOUT", "PEER_UNREACHABLE"}),
    ],
)
def test_a_status_at_an_opening_ends_it(victim: Engine, rogue: Rogue, code: grpc.StatusCode, reasons: set[str]) -> None:
    rogue.changes["OpenAccess"] = abort(code)
    reason, phase = pull_fails(victim, rogue)
    assert (reason in reasons, phase) == (True, "open"), reason


def verdict(**fields: Any) -> Change:
    def change(reply: peer_pb2.SettleAccessResponse) -> None:
        reply.results[0].Clear()
        reply.results[0].MergeFrom(peer_pb2.SettledAccess(**fields))

    return change


EXPIRED = common_pb2.FAILURE_REASON_LEASE_EXPIRED
BAD_SETTLES = {
    "no row": (rows(0), "PEER_FAILED"),
    "two rows": (rows(2), "PEER_FAILED"),
    "no verdict": (verdict(), "INTERNAL"),
    "an unknown verdict": (verdict(verdict=77), "INTERNAL"),
    "stale": (verdict(verdict=peer_pb2.VERDICT_STALE, reason=EXPIRED), "LEASE_EXPIRED"),
    "stale for no reason": (verdict(verdict=peer_pb2.VERDICT_STALE), "INTERNAL"),
    "refused": (abort(grpc.StatusCode.PERMISSION_DENIED), "PEER_FAILED"),
    "never": (too_late, "SETTLE_TIMEOUT"),
    "unavailable": (abort(grpc.StatusCode.UNAVAILABLE), "SETTLE_TIMEOUT"),
}


@pytest.mark.parametrize("case", BAD_SETTLES)
def test_what_is_not_settled_as_valid_is_never_offered(victim: Engine, rogue: Rogue, case: str) -> None:
    rogue.changes["SettleAccess"], reason = BAD_SETTLES[case]
    assert pull_fails(victim, rogue) == (reason, "settle")


def described(**fields: Any) -> Change:
    def change(reply: Any) -> None:
        for name, value in fields.items():
            setattr(reply.engine, name, value)

    return change


def without_endpoints(reply: Any) -> None:
    del reply.endpoints[:]


def another_rank(reply: Any) -> None:
    reply.endpoints[0].rank = 7


def wrong_token(reply: Any) -> None:
    reply.endpoints[0].shm.token = b"no such token"


def no_socket(reply: Any) -> None:
    reply.endpoints[0].shm.socket_path = "/nonexistent/socket"


def empty_endpoint(reply: Any) -> None:
    reply.endpoints[0].ClearField("shm")


BAD_HANDSHAKES: dict[str, tuple[Change, set[str]]] = {
    "another engine": (described(engine_id="somebody-else"), {"WRONG_ENGINE"}),
    "no life": (described(incarnation=0), {"PEER_FAILED"}),
    "other weights": (described(weights_revision="v9"), {"WEIGHTS_MISMATCH"}),
    "another protocol": (described(protocol_min=9, protocol_max=9), {"PROTOCOL_UNSUPPORTED"}),
    "no endpoints": (without_endpoints, {"NO_DATA_PATH", "PEER_UNREACHABLE", "PEER_FAILED", "INVALID_FIELD"}),
    "endpoint of another rank": (another_rank, {"NO_DATA_PATH", "PEER_UNREACHABLE", "PEER_FAILED", "INVALID_FIELD"}),
    "empty endpoint": (empty_endpoint, {"NO_DATA_PATH"}),
    "wrong token": (wrong_token, {"NO_DATA_PATH"}),
    "no socket": (no_socket, {"NO_DATA_PATH"}),
    "never": (too_late, {"PEER_UNREACHABLE", "QUEUE_TIMEOUT"}),
    "refused": (abort(grpc.StatusCode.PERMISSION_DENIED), {"PEER_FAILED"}),
}


@pytest.mark.parametrize("case", BAD_HANDSHAKES)
def test_a_handshake_that_makes_no_sense_fails_the_pull(victim: Engine, rogue: Rogue, case: str) -> None:
    rogue.changes["Handshake"], reasons = BAD_HANDSHAKES[case]
    reason, phase = pull_fails(victim, rogue)
    assert (reason in reasons, phase) == (True, "handshake"), reason


def test_a_source_that_never_opens_is_given_up(victim: Engine, rogue: Rogue) -> None:
    rogue.changes["OpenAccess"] = too_late
    assert pull_fails(victim, rogue) == ("QUEUE_TIMEOUT", "open")


def test_a_source_without_liveness_is_given_up(victim: Engine, rogue: Rogue) -> None:
    rogue.changes["KeepLiveness"] = abort(grpc.StatusCode.UNIMPLEMENTED)
    reason, phase = pull_fails(victim, rogue)
    assert (reason, phase) == ("PEER_FAILED", "handshake")


def test_a_source_that_forgets_its_peer_again_and_again_is_given_up(victim: Engine, rogue: Rogue) -> None:
    info = b"\x12\x1b\x0a\x0cNO_HANDSHAKE\x12\x09kvgrpc.v1\x1a\x00"
    status = b"\x08\x09\x1a\x47\x0a\x28type.googleapis.com/google.rpc.ErrorInfo" + info
    rogue.changes["OpenAccess"] = abort(grpc.StatusCode.FAILED_PRECONDITION, ("grpc-status-details-bin", status))
    reason, _ = pull_fails(victim, rogue)
    assert reason in {"QUEUE_TIMEOUT", "NO_HANDSHAKE", "PEER_FAILED"}


def test_a_close_that_is_refused_or_unanswered_holds_nothing_up(victim: Engine, rogue: Rogue) -> None:
    rogue.changes["CloseAccess"] = abort(grpc.StatusCode.UNAVAILABLE)
    pulled = victim.pull(rogue.grant(40), TOKENS, None)
    wait_until(lambda: victim.get(pulled.transfer_id).waiting_for == transfer_pb2.WAITING_FOR_BLOCKS)
    assert victim.cancel(pulled.transfer_id).transfers[0].memory == RETURNED
    wait_until(lambda: rogue.calls.get("CloseAccess", 0) >= 2)
    del rogue.changes["CloseAccess"]
    victim.check_alive()


def test_a_lease_of_no_length_is_not_renewed_in_a_storm(victim: Engine, rogue: Rogue) -> None:
    rogue.changes["OpenAccess"] = opened(ttl=dur(1e-9), remaining=dur(1e-9))
    pulled = victim.pull(rogue.grant(40), TOKENS, None)
    wait_until(lambda: rogue.calls.get("RenewLeases", 0) >= 3)
    before = rogue.calls["RenewLeases"]
    for _ in range(20):
        victim.check_alive()
    assert rogue.calls["RenewLeases"] - before <= 10
    victim.cancel(pulled.transfer_id)


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_a_renewal_with_other_rows_than_asked_for_is_harmless(victim: Engine, rogue: Rogue, count: int) -> None:
    def change(_: Any) -> lease_pb2.RenewLeasesResponse:
        return lease_pb2.RenewLeasesResponse(leases=[lease_pb2.RenewedLease(remaining=dur(1))] * count)

    rogue.changes["RenewLeases"] = change
    rogue.changes["OpenAccess"] = opened(ttl=dur(0.3), remaining=dur(0.3))
    pulled = victim.pull(rogue.grant(40), TOKENS, None)
    wait_until(lambda: rogue.calls.get("RenewLeases", 0) >= 2)
    victim.give(pulled.transfer_id, victim.allocate(3))
    assert victim.wait(pulled.transfer_id).state == SUCCEEDED


def test_a_renewal_that_finds_no_lease_ends_a_pull_that_waits(victim: Engine, rogue: Rogue) -> None:
    rogue.changes["OpenAccess"] = opened(ttl=dur(0.3), remaining=dur(0.3))
    rogue.changes["RenewLeases"] = lambda _: lease_pb2.RenewLeasesResponse(
        leases=[lease_pb2.RenewedLease(reason=common_pb2.FAILURE_REASON_LEASE_VOIDED)]
    )
    pulled = victim.pull(rogue.grant(40), TOKENS, None)
    end = victim.wait(pulled.transfer_id)
    assert (end.failure.reason, end.failure.phase) == (
        common_pb2.FAILURE_REASON_LEASE_VOIDED,
        common_pb2.TRANSFER_PHASE_QUEUE,
    )


def test_an_exception_of_a_change_is_what_it_says() -> None:
    with pytest.raises(Abort):
        abort(grpc.StatusCode.ABORTED)(None)
