"""The policy of a scheduler at ends: losses, aborts, and hooks that are called too late."""

import pytest

from kvgrpc.core.policy.values import (
    Arrival,
    Cancel,
    Give,
    LoadEnded,
    Loss,
    Match,
    OnLoss,
    RequestSide,
    Reserve,
    SendEnded,
    Take,
    TakeLost,
)
from kvgrpc.errors import NextStep, Reason
from tests.core.policy.policies import (
    ABORTED,
    COMPLETE,
    FREE,
    KEPT,
    LOST,
    PULL,
    PUSH,
    TABLE,
    R,
    decode,
    loading,
    policy,
    prefill,
)

# ---- what does not come


@pytest.mark.parametrize("on_loss", OnLoss)
def test_what_fails_while_it_comes_is_told_with_its_blocks_when_they_are_at_rest(on_loss: OnLoss) -> None:
    made = loading(policy(on_loss=on_loss), decode(), 16)
    made.failed(R, RequestSide.TAKE, LOST)
    made.failed(R, RequestSide.TAKE, Loss(Reason.DEADLINE, "later", NextStep.RECOMPUTE))
    assert made.take_told() == []
    made.returned(R, RequestSide.TAKE)
    made.returned(R, RequestSide.TAKE)
    assert made.take_told() == [LoadEnded(R, 16, LOST, ((11, 12, 13),), on_loss)]


def test_what_fails_before_blocks_are_there_is_told_and_computed_here() -> None:
    made = policy(on_loss=OnLoss.RECOMPUTE)
    made.arrived(decode())
    made.failed(R, RequestSide.TAKE, LOST)
    made.returned(R, RequestSide.TAKE)
    assert made.take_told() == [TakeLost(R, LOST, OnLoss.RECOMPUTE)]
    assert made.match(R, 0) == Match(0)
    made.take_tasks()
    made.allocated(R, TABLE, 0, 0)
    assert made.take_tasks() == []


def test_what_fails_before_blocks_are_there_fails_the_request_where_nothing_is_recomputed() -> None:
    made = policy()
    made.arrived(decode())
    made.failed(R, RequestSide.TAKE, LOST)
    made.take_told()
    made.allocated(R, TABLE, 0, made.match(R, 0).tokens)
    assert made.take_told() == [LoadEnded(R, 0, LOST, ((10, 11, 12, 13),), OnLoss.FAIL)]


def test_a_transfer_that_ends_without_a_word_is_a_loss_too() -> None:
    made = loading(policy(), decode())
    made.returned(R, RequestSide.TAKE)
    ((ended,),) = (made.take_told(),)
    assert isinstance(ended, LoadEnded)
    assert ended.loss is not None


# ---- aborts


def test_an_abort_before_blocks_are_there_ends_the_pull() -> None:
    made = policy()
    made.arrived(decode())
    made.take_tasks()
    assert made.aborted(R, "client left") == FREE
    assert made.take_tasks() == [Cancel(R, RequestSide.TAKE, "client left")]
    assert R not in made


@pytest.mark.parametrize("keep", [False, True])
def test_an_abort_before_blocks_are_there_lets_the_source_of_a_push_go_unless_another_may_come(keep: bool) -> None:
    made = policy()
    made.arrived(Arrival(R, 64, Take(PUSH, 64, keep)))
    assert made.aborted(R) == FREE
    assert made.take_tasks() == ([] if keep else [Reserve(R, (), 64, 64, 0)])


@pytest.mark.parametrize("received", [True, False])
def test_blocks_that_are_being_filled_are_kept_through_an_abort_until_they_are_at_rest(received: bool) -> None:
    made = loading(policy(), decode())
    assert made.aborted(R) == KEPT
    assert made.aborted(R) == KEPT
    assert made.finished(R, TABLE, 0, ABORTED) == KEPT
    assert [type(task) for task in made.take_tasks()] == [Cancel]
    if received:
        made.received(R, 70)
    else:
        made.failed(R, RequestSide.TAKE, LOST)
        made.returned(R, RequestSide.TAKE)
    (ended,) = made.take_told()
    assert isinstance(ended, LoadEnded)
    assert ended.loss is not None
    assert ended.loss.reason is Reason.CANCELLED
    assert R not in made


def test_an_abort_of_what_was_handed_over_ends_that_too() -> None:
    made = policy()
    made.arrived(prefill())
    made.finished(R, TABLE, 64, COMPLETE)
    made.take_tasks()
    assert made.aborted(R, "nobody comes") == KEPT
    made.aborted(R)
    assert made.take_tasks() == [Cancel(R, RequestSide.GIVE, "nobody comes")]
    made.failed(R, RequestSide.GIVE, LOST)
    made.returned(R, RequestSide.GIVE)
    (ended,) = made.take_told()
    assert isinstance(ended, SendEnded)
    assert len(made) == 0


def test_hooks_of_unknown_requests_change_nothing() -> None:
    made = policy()
    made.allocated(R, TABLE, 0, 64)
    made.computed(R, TABLE, 64, 1)
    made.preempted(R)
    assert made.finished(R, TABLE, 64, COMPLETE) == made.aborted(R) == FREE
    made.received(R, 64)
    made.loaded(R)
    made.failed(R, RequestSide.GIVE, LOST)
    made.returned(R, RequestSide.TAKE)
    assert (made.take_tasks(), made.take_told(), len(made)) == ([], [], 0)


# ---- late calls


def test_of_a_push_whose_request_has_left_nothing_is_taken_back() -> None:
    made = policy()
    made.arrived(prefill(PUSH))
    made.finished(R, TABLE, 64, COMPLETE)
    made.take_tasks()
    made.preempted(R)
    assert made.take_tasks() == []


def test_nothing_comes_any_more_to_a_request_that_has_left() -> None:
    made = policy()
    made.arrived(Arrival(R, 64, Take(PULL, 64), Give(PULL)))
    made.failed(R, RequestSide.TAKE, LOST)
    made.finished(R, TABLE, 64, COMPLETE)
    made.take_told()
    assert made.match(R, 0) == Match(0)
    made.allocated(R, TABLE, 0, 0)
    assert made.take_told() == []


def test_what_a_source_took_back_before_blocks_were_there_is_computed_whatever_the_rules_say() -> None:
    made = policy(on_loss=OnLoss.FAIL)
    made.arrived(decode())
    lost = Loss(Reason.LEASE_RECLAIMED, "an older request needed the blocks", NextStep.RECOMPUTE)
    made.failed(R, RequestSide.TAKE, lost)
    assert made.take_told() == [TakeLost(R, lost, OnLoss.RECOMPUTE)]
    assert made.match(R, 0) == Match(0)
