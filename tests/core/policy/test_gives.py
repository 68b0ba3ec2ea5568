"""The policy of a scheduler as a source: it gives a request's KV part by part, or when the request has finished."""

import pytest

from kvgrpc.core.policy.values import (
    Arrival,
    Finished,
    Give,
    GiveUp,
    HandOverBlocks,
    HandOverPart,
    Load,
    LoadEnded,
    Loss,
    ModeChoice,
    OnLoss,
    RequestSide,
    Save,
    SendEnded,
    StartOver,
    Take,
)
from kvgrpc.core.values.layout import Group, GroupKind
from kvgrpc.errors import NextStep, Reason
from tests.core.policy.policies import (
    ABORTED,
    COMPLETE,
    FREE,
    FULL,
    KEPT,
    LOST,
    PULL,
    PUSH,
    STATE,
    TABLE,
    R,
    decode,
    loading,
    policy,
    prefill,
)

# ---- what is given


def test_a_finished_prefill_is_handed_over_with_what_was_computed_and_kept_until_it_is_back() -> None:
    made = policy()
    assert made.arrived(prefill(prompt=50)).one_token
    assert made.finished(R, TABLE, 50, COMPLETE, step=9) == Finished(keep=True, handed_over=True)
    assert made.take_tasks() == [HandOverBlocks(R, ((10, 11, 12, 13),), 50, 9)]
    assert made.finished(R, TABLE, 50, COMPLETE) == Finished(keep=True, handed_over=True), "told twice"
    assert made.take_tasks() == []
    made.returned(R, RequestSide.GIVE)
    assert made.take_told() == [SendEnded(R, None)]
    assert R not in made


def test_a_decode_engine_offers_all_that_has_kv_for_the_next_turn() -> None:
    made = loading(policy(), Arrival(R, 48, Take(PULL, 48), Give(PULL, prefill=False)))
    made.received(R, 70)
    assert made.finished(R, TABLE, 66, COMPLETE).handed_over
    assert made.take_tasks() == [HandOverBlocks(R, TABLE, 66, 0)]


def test_what_would_be_handed_over_can_be_asked_before() -> None:
    made = policy()
    made.arrived(prefill())
    assert [made.given_tokens(R, 70, outcome) for outcome in (COMPLETE, ABORTED)] == [64, 0]
    made.finished(R, TABLE, 64, COMPLETE)
    assert [made.given_tokens(id_, 64, COMPLETE) for id_ in (R, "unheard of")] == [0, 0]


def test_of_a_prefill_no_more_than_the_prompt_is_handed_over() -> None:
    made = policy()
    made.arrived(prefill(prompt=48))
    made.finished(R, TABLE, 52, COMPLETE)
    assert made.take_tasks() == [HandOverBlocks(R, ((10, 11, 12),), 48, 0)]


def test_a_prefill_of_which_nothing_is_known_is_handed_over_at_its_end() -> None:
    made = policy()
    made.arrived(prefill(ModeChoice.AUTO))
    made.computed(R, TABLE, 32, 1)
    assert not made.pushes(R)
    made.finished(R, TABLE, 64, COMPLETE, step=2)
    assert made.take_tasks() == [HandOverBlocks(R, ((10, 11, 12, 13),), 64, 2)]
    assert not made.wanted(R), "it has left"


def test_a_prefill_is_pushed_from_when_a_destination_has_come_with_what_was_computed_before() -> None:
    made = policy()
    made.arrived(prefill(ModeChoice.AUTO))
    made.computed(R, TABLE, 32, 1)
    assert made.wanted(R)
    assert made.pushes(R)
    made.computed(R, TABLE, 50, 2)
    assert made.take_tasks() == [HandOverPart(R, ((10, 11, 12),), None, last=False, after_step=2)]
    made.finished(R, TABLE, 64, COMPLETE, step=3)
    assert made.take_tasks() == [HandOverPart(R, ((13,),), None, last=True, after_step=3)]
    assert made.pushes(R)


@pytest.mark.parametrize("mode", [PULL, PUSH])
def test_a_destination_that_comes_changes_nothing_where_the_mode_is_said(mode: ModeChoice) -> None:
    made = policy()
    made.arrived(prefill(mode))
    assert made.wanted(R) is made.pushes(R) is (mode is PUSH)
    assert not made.wanted("unheard of")
    assert not made.pushes("unheard of")


def test_a_destination_that_may_wait_hears_that_its_prefill_did_not_finish() -> None:
    made = policy()
    made.arrived(prefill(ModeChoice.AUTO))
    made.finished(R, TABLE, 64, ABORTED)
    assert made.take_tasks() == [GiveUp(R, "its request did not finish")]


@pytest.mark.parametrize("mode", [PULL, PUSH])
def test_what_did_not_finish_is_not_handed_over_and_a_waiting_destination_is_told(mode: ModeChoice) -> None:
    made = policy()
    made.arrived(prefill(mode))
    assert made.finished(R, TABLE, 64, ABORTED) == FREE
    assert [type(task) for task in made.take_tasks()] == ([GiveUp] if mode is PUSH else [])
    assert R not in made


@pytest.mark.parametrize("end", ["does not finish", "is aborted"])
def test_a_destination_that_came_hears_that_what_would_be_pulled_is_not_there(end: str) -> None:
    made = policy()
    made.arrived(prefill(PULL))
    assert not made.wanted(R), "it is pulled when it has finished"
    assert (made.aborted(R) if end == "is aborted" else made.finished(R, TABLE, 64, ABORTED)) == FREE
    assert [type(task) for task in made.take_tasks()] == [GiveUp]
    assert R not in made


def test_a_push_that_is_given_up_after_its_first_parts_keeps_their_blocks_until_they_are_at_rest() -> None:
    made = policy()
    made.arrived(prefill(PUSH))
    made.computed(R, TABLE, 32, 1)
    assert made.aborted(R, "enough") == KEPT
    assert made.take_tasks()[1:] == [GiveUp(R, "enough")]
    made.returned(R, RequestSide.GIVE)
    assert made.take_told() == [SendEnded(R, Loss(Reason.CANCELLED, "enough", NextStep.RECOMPUTE))]
    assert len(made) == 0


def test_a_push_sends_whole_blocks_as_they_are_computed_and_the_rest_at_the_end() -> None:
    made = policy()
    made.arrived(prefill(PUSH, prompt=70))
    made.computed(R, TABLE, 40, 1)
    made.computed(R, TABLE, 40, 1)
    made.computed(R, TABLE, 70, 2)
    assert made.finished(R, TABLE, 70, COMPLETE, 2).handed_over
    assert made.take_tasks() == [
        HandOverPart(R, ((10, 11),), None, last=False, after_step=1),
        HandOverPart(R, ((12, 13),), None, last=False, after_step=2),
        HandOverPart(R, ((14,),), None, last=True, after_step=2),
    ]


def test_a_push_whose_parts_all_went_ends_with_an_empty_one() -> None:
    made = policy()
    made.arrived(prefill(PUSH, prompt=32))
    made.computed(R, TABLE, 32, 1)
    made.finished(R, TABLE, 32, COMPLETE, 1)
    assert made.take_tasks()[-1] == HandOverPart(R, ((),), None, last=True, after_step=1)


def test_a_layer_wise_push_sends_each_part_in_ranges_of_layers() -> None:
    made = policy(layer_ranges=((0, 1), (1, 1)))
    made.arrived(prefill(PUSH, prompt=32))
    made.finished(R, TABLE, 32, COMPLETE, 1)
    blocks = ((10, 11),)
    assert made.take_tasks() == [
        HandOverPart(R, blocks, (0, 1), last=False, after_step=1),
        HandOverPart(R, blocks, (1, 1), last=True, after_step=1),
    ]


def test_a_part_lists_blocks_of_those_groups_only_that_have_its_layers() -> None:
    one = Group("one", GroupKind.FULL_ATTENTION, 1, 16, 64, 1, 8, "uint8")
    made = policy(one, layer_ranges=((0, 1), (1, 1)))
    made.arrived(prefill(PUSH, prompt=40))
    made.computed(R, TABLE, 32, 1)
    assert made.take_tasks() == [HandOverPart(R, ((10, 11),), (0, 1), last=False, after_step=1)]
    made.finished(R, TABLE, 40, COMPLETE, 2)
    assert made.take_tasks() == [
        HandOverPart(R, ((12,),), (0, 1), last=False, after_step=2),
        HandOverPart(R, ((),), (1, 1), last=True, after_step=2),
    ]


def test_a_decode_engine_pushes_what_it_has_at_its_end_only() -> None:
    made = policy()
    made.arrived(Arrival(R, 32, give=Give(PUSH, prefill=False)))
    made.computed(R, TABLE, 48, 1)
    assert made.take_tasks() == []
    made.finished(R, TABLE, 60, COMPLETE, 2)
    assert made.take_tasks() == [HandOverPart(R, (TABLE[0][:4],), None, last=True, after_step=2)]


def test_states_go_with_the_last_part() -> None:
    made = policy(FULL, STATE)
    made.arrived(prefill(PUSH, prompt=40))
    table = ((10, 11, 12), (5, 6))
    made.computed(R, table, 32, 1)
    made.finished(R, table, 40, COMPLETE, 2)
    assert made.take_tasks() == [
        HandOverPart(R, ((10, 11), ()), None, last=False, after_step=1),
        HandOverPart(R, ((12,), (6,)), None, last=True, after_step=2),
    ]


def test_a_state_of_more_tokens_than_are_given_goes_nowhere() -> None:
    """This happens to a prefill that computes its whole prompt, since all its outputs are wanted."""
    table = ((10, 11, 12), (5,))
    for mode, tasks in ((PULL, []), (PUSH, [GiveUp(R, "its state is of more tokens")])):
        made = policy(FULL, STATE, backoff_tokens=1)
        made.arrived(prefill(mode, prompt=40, needs_all_outputs=True))
        assert made.given_tokens(R, 40, COMPLETE) == 0
        assert made.finished(R, table, 40, COMPLETE) == FREE
        assert made.take_tasks() == tasks


def test_a_preempted_prefill_starts_its_push_over() -> None:
    made = policy()
    made.arrived(prefill(PUSH, prompt=32))
    made.preempted(R)
    assert made.take_tasks() == [], "nothing was sent"
    made.computed(R, TABLE, 16, 1)
    made.preempted(R)
    made.preempted(R)
    made.computed(R, ((30, 31),), 32, 5)
    assert made.take_tasks()[1:] == [StartOver(R), HandOverPart(R, ((30, 31),), None, last=False, after_step=5)]


def test_a_push_that_fails_while_it_is_computed_sends_no_more_and_keeps_nothing_once_it_is_back() -> None:
    made = policy()
    made.arrived(prefill(PUSH))
    made.computed(R, TABLE, 32, 1)
    made.take_tasks()
    made.failed(R, RequestSide.GIVE, LOST)
    made.computed(R, TABLE, 48, 2)
    assert made.take_tasks() == []
    made.returned(R, RequestSide.GIVE)
    made.computed(R, TABLE, 64, 2)
    assert made.finished(R, TABLE, 64, COMPLETE, 2) == FREE
    assert (made.take_tasks(), made.take_told()) == ([], [])


# ---- staged engines


def test_a_staged_engine_saves_what_each_step_computed_and_loads_what_came() -> None:
    made = policy(staged=True)
    made.arrived(prefill(prompt=40))
    made.computed(R, TABLE, 20, 1)
    made.computed(R, TABLE, 40, 2)
    made.finished(R, TABLE, 40, COMPLETE, 2)
    assert made.take_told() == [Save(R, ((10, 11),)), Save(R, ((11, 12),))]
    made = loading(policy(staged=True), decode())
    made.received(R, 70)
    assert made.take_told() == [Load(R, ((10, 11, 12, 13),))]
    made.loaded(R)
    made.loaded(R)
    assert made.take_told() == [LoadEnded(R, 64, None, (), OnLoss.FAIL)]
