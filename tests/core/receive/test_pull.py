"""A pull as data: its stages, and the next step that each kind of failure suggests to the caller."""

from kvgrpc.core.moves.failures import NEXT_STEPS, TIMEOUTS, move_failure
from kvgrpc.core.state.move import MOVE_TIMERS, STAGES, MoveStage, PullMove
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import Side
from kvgrpc.core.values.grants import AccessKind, Claims
from kvgrpc.errors import NextStep, Reason
from tests.core.nodes import KEY, access_id, check_table, claim, ids

CLAIMS = Claims(AccessKind.READ, "p", 1, "p:1", "l", KEY, 1.0, 1, 16)


def make(stage: MoveStage = MoveStage.CONNECTING) -> PullMove:
    return PullMove("t", b"token", CLAIMS, access_id(), "", claim(16), stage=stage)


def test_every_move_of_the_table_happens_and_no_other() -> None:
    def move(before: MoveStage, after: MoveStage) -> MoveStage:
        pull = make(before)
        try:
            pull.move(after)
        except AssertionError:
            assert pull.stage is before
            raise
        return pull.stage

    check_table(STAGES, move)


def test_a_pull_settles_only_when_nothing_is_left_to_move() -> None:
    assert {stage for stage in MoveStage if MoveStage.SETTLING in STAGES[stage]} == {MoveStage.OPEN, MoveStage.WIRE}
    assert {stage for stage in MoveStage if MoveStage.WIRE in STAGES[stage]} == {MoveStage.OPEN}
    assert all(MoveStage.ENDED in STAGES[stage] for stage in MoveStage if stage is not MoveStage.ENDED)


def test_a_destination_that_is_given_and_empty_moves_nothing() -> None:
    pull = make()
    assert not pull.moves_nothing
    pull.destination = (ids(), ids())
    assert pull.moves_nothing
    pull.destination = (ids(), ids(1))
    assert not pull.moves_nothing


def test_every_reason_says_what_would_help() -> None:
    failures = {reason: move_failure(make(MoveStage.WIRE), reason, "why", rank=3) for reason in Reason}
    assert [r for r, failure in failures.items() if failure.next is not NEXT_STEPS.get(r, NextStep.RECOMPUTE)] == []
    assert {(failure.phase, failure.rank, failure.message) for failure in failures.values()} == {("wire", 3, "why")}


def test_a_lost_source_is_computed_anew_and_a_slow_one_tried_again() -> None:
    steps = {reason: move_failure(make(), reason, "").next for reason in Reason}
    for reason in (Reason.LEASE_EXPIRED, Reason.INCARNATION_CHANGED, Reason.PEER_LOST, Reason.MEMORY_CHANGED):
        assert steps[reason] is NextStep.RECOMPUTE
    for reason in (Reason.TRANSFER_TIMEOUT, Reason.SETTLE_TIMEOUT, Reason.DATA_PATH_FAILED):
        assert steps[reason] is NextStep.RETRY_HERE
    for reason in (Reason.PEER_UNREACHABLE, Reason.NO_DATA_PATH, Reason.INCOMPATIBLE_POOLS):
        assert steps[reason] is NextStep.RETRY_OTHER_CONSUMER
    for reason in (Reason.CONTENT_MISMATCH, Reason.GRANT_INVALID, Reason.DIAL_REFUSED):
        assert steps[reason] is NextStep.FIX_REQUEST


def test_a_failure_names_its_side() -> None:
    sides = {reason: move_failure(make(), reason, "").side for reason in Reason}
    assert sides[Reason.DATA_PATH_FAILED] is sides[Reason.QUEUE_TIMEOUT] is Side.DESTINATION
    assert sides[Reason.LEASE_EXPIRED] is sides[Reason.SETTLE_TIMEOUT] is sides[Reason.PEER_LOST] is Side.SOURCE


def test_every_deadline_of_a_pull_is_cleared_at_its_end() -> None:
    assert set(TIMEOUTS) <= set(MOVE_TIMERS)
    assert {Timer.OPEN_RETRY, Timer.SETTLE_RETRY, Timer.RENEW} <= set(MOVE_TIMERS)
