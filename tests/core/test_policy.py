"""The policy of a scheduler: what each hook decides, in the words of those who need it."""

from typing import Any

import pytest

from kvgrpc.core.layout import Group, GroupKind
from kvgrpc.core.policy import Policy
from kvgrpc.core.policy_values import (
    Arrival,
    Begin,
    Cancel,
    Finished,
    Give,
    GiveUp,
    HandOver,
    Load,
    LoadEnded,
    Loss,
    Match,
    Mode,
    OnLoss,
    Outcome,
    Part,
    Reserve,
    Rules,
    Save,
    SendEnded,
    Side,
    Start,
    StartOver,
    Take,
    TakeLost,
)
from kvgrpc.core.transfers import Next
from kvgrpc.errors import AlreadyExists, Exhausted, InvalidRequest, Reason
from tests.core.nodes import refused

FULL = Group("full", GroupKind.FULL_ATTENTION, 2, 16, 64, 1, 8, "uint8")
STATE = Group("state", GroupKind.STATE, 2, 16, 64, 1, 8, "uint8")
LOST = Loss(Reason.PEER_LOST, "gone", Next.RETRY_OTHER_CONSUMER)
PULL, PUSH = Mode.PULL, Mode.PUSH
COMPLETE, ABORTED = Outcome.COMPLETE, Outcome.ABORTED
R = "r1"
TABLE = ((10, 11, 12, 13, 14),)
KEPT, FREE = Finished(keep=True, handed_over=False), Finished(keep=False, handed_over=False)


def policy(*groups: Group, **rules: Any) -> Policy:
    return Policy(Rules(groups or (FULL,), **rules))


def decode(mode: Mode = PULL, offer: int = 64, prompt: int = 64, **fields: Any) -> Arrival:
    """A request whose prefill was done elsewhere, or is being done."""
    return Arrival(R, prompt, Take(mode, offer), **fields)


def prefill(mode: Mode = PULL, prompt: int = 64, **fields: Any) -> Arrival:
    return Arrival(R, prompt, give=Give(mode), **fields)


def loading(made: Policy, arrival: Arrival, computed: int = 0) -> Policy:
    """The policy, when blocks for what comes were allocated."""
    made.arrived(arrival)
    made.allocated(R, TABLE, computed, made.match(R, computed).tokens)
    made.take_tasks()
    return made


# ---- what is taken


def test_a_pull_begins_when_its_request_arrives_so_that_its_source_holds_the_kv() -> None:
    made = policy()
    admitted = made.arrived(decode(offer=50, prompt=50))
    assert (admitted.prompt_tokens, admitted.one_token) == (50, False)
    assert made.take_tasks() == [Begin(R, 50)]


@pytest.mark.parametrize(
    ("offer", "prompt", "computed", "tokens"),
    [
        (64, 64, 0, 64),
        (64, 64, 48, 16),
        (64, 64, 64, 0),
        (64, 64, 70, 0),
        (50, 70, 0, 50),
        (70, 50, 0, 48),
        (70, 10, 0, 0),
    ],
)
def test_what_is_offered_and_wanted_and_missing_can_come(offer: int, prompt: int, computed: int, tokens: int) -> None:
    made = policy()
    made.arrived(decode(offer=offer, prompt=prompt))
    assert made.match(R, computed) == Match(tokens)


@pytest.mark.parametrize(("offer", "prompt", "tokens"), [(50, 70, 48), (50, 50, 50), (70, 50, 48)])
def test_a_prompt_that_is_known_by_whole_units_takes_whole_units_or_all(offer: int, prompt: int, tokens: int) -> None:
    made = policy()
    made.arrived(decode(offer=offer, prompt=prompt, whole_units=True))
    assert made.match(R, 0) == Match(tokens)


def test_to_ask_what_can_come_changes_nothing() -> None:
    made = policy()
    made.arrived(decode())
    made.take_tasks()
    assert {made.match(R, 16) for _ in range(9)} == {Match(48)}
    assert made.match("unheard of", 0) == Match(0)
    assert (made.take_tasks(), made.take_told()) == ([], [])


def test_blocks_from_the_first_that_is_not_whole_are_filled_and_once_only() -> None:
    made = policy()
    made.arrived(decode(offer=70, prompt=70))
    made.take_tasks()
    made.allocated(R, TABLE, 20, 50, after_step=7)
    assert made.take_tasks() == [Start(R, ((11, 12, 13, 14),), 20, 7)]
    assert made.match(R, 20) == Match(0), "a request takes KV once"
    made.allocated(R, TABLE, 70, 0)
    assert made.take_tasks() == []
    made.received(R)
    made.received(R)
    assert made.take_told() == [LoadEnded(R, 70, None, (), OnLoss.FAIL)]


def test_a_source_is_let_go_when_everything_was_found_here() -> None:
    made = policy()
    made.arrived(decode())
    made.allocated(R, TABLE, 64, 0)
    assert made.take_tasks() == [Begin(R, 64), Start(R, (), 0, 0)]
    made.received(R)
    assert made.take_told() == []


def test_the_source_of_a_push_is_let_go_by_a_reservation_of_nothing() -> None:
    made = policy()
    made.arrived(decode(PUSH))
    made.allocated(R, TABLE, 64, 0, after_step=3)
    assert made.take_tasks() == [Reserve(R, (), 64, 64, 3)]


def test_for_a_push_blocks_are_reserved_when_there_are_some() -> None:
    made = policy()
    made.arrived(decode(PUSH))
    assert made.take_tasks() == []
    made.allocated(R, TABLE, 16, 48, after_step=3)
    assert made.take_tasks() == [Reserve(R, ((11, 12, 13),), 16, 64, 3)]


@pytest.mark.parametrize("mode", [PULL, PUSH])
def test_nothing_is_taken_for_a_request_that_needs_all_its_outputs_and_its_source_is_let_go(mode: Mode) -> None:
    made = policy()
    made.arrived(decode(mode, needs_all_outputs=True))
    assert made.match(R, 0) == Match(0)
    wanted = [Begin(R, 0), Start(R, (), 0, 0)] if mode is PULL else [Reserve(R, (), 64, 64, 0)]
    assert made.take_tasks() == wanted


def test_a_prompt_without_token_ids_takes_nothing_and_says_so() -> None:
    made = policy()
    made.arrived(decode(prompt=0))
    (lost,) = made.take_told()
    assert isinstance(lost, TakeLost)
    assert lost.loss.reason is Reason.CONTENT_REQUIRED
    assert made.match(R, 0) == Match(0)
    assert made.finished(R, TABLE, 64, COMPLETE) == FREE


def test_a_prefill_takes_history_back_only_if_that_is_worth_it() -> None:
    for missing, tokens in ((63, 0), (64, 64)):
        made = policy()
        made.arrived(Arrival(R, 200, Take(PULL, 112), Give(PULL)))
        assert made.match(R, 112 - missing) == Match(tokens)
        made.allocated(R, ((*range(20),),), 112 - missing, tokens)
        assert isinstance(made.take_tasks()[-1], Start), "the lease on the history ends in any case"


def test_a_prompt_whose_last_token_the_decode_engine_computes_is_taken_without_it() -> None:
    made = policy(FULL, STATE, backoff_tokens=1)
    assert made.arrived(prefill(prompt=50)).prompt_tokens == 49
    made = policy(FULL, STATE, backoff_tokens=1)
    assert made.arrived(prefill(prompt=1)).prompt_tokens == 1
    made = policy(FULL, STATE, backoff_tokens=1)
    made.arrived(decode(offer=49, prompt=50))
    made.allocated(R, ((1, 2, 3, 4), (7, 8, 9)), 0, made.match(R, 0).tokens)
    assert made.take_tasks() == [Begin(R, 49), Start(R, ((1, 2, 3, 4), (9,)), 0, 0)], "the running state is the last"


def test_states_are_taken_whole_or_not_at_all() -> None:
    made = policy(FULL, STATE)
    made.arrived(decode(offer=70, prompt=64))
    assert made.match(R, 0) == Match(0)


@pytest.mark.parametrize(
    ("table", "computed", "external", "reason"),
    [
        (TABLE, 0, 32, Reason.INVALID_FIELD),
        (((1, 2, 3),), 0, 64, Reason.BLOCK_COUNT_MISMATCH),
        (((1, 2, 3, 4), (5,)), 0, 64, Reason.GROUP_MISMATCH),
    ],
)
def test_blocks_that_do_not_fit_what_comes_are_refused_and_nothing_changed(
    table: Any, computed: int, external: int, reason: Reason
) -> None:
    made = policy()
    made.arrived(decode())
    made.take_tasks()
    with refused(reason, InvalidRequest):
        made.allocated(R, table, computed, external)
    assert made.take_tasks() == []
    assert made.match(R, 0) == Match(64)


# ---- what does not come


@pytest.mark.parametrize("on_loss", OnLoss)
def test_what_fails_while_it_comes_is_told_with_its_blocks_when_they_are_at_rest(on_loss: OnLoss) -> None:
    made = loading(policy(on_loss=on_loss), decode(), 16)
    made.failed(R, Side.TAKE, LOST)
    made.failed(R, Side.TAKE, Loss(Reason.DEADLINE, "later", Next.RECOMPUTE))
    assert made.take_told() == []
    made.returned(R, Side.TAKE)
    made.returned(R, Side.TAKE)
    assert made.take_told() == [LoadEnded(R, 16, LOST, ((11, 12, 13),), on_loss)]


def test_what_fails_before_blocks_are_there_is_told_and_computed_here() -> None:
    made = policy(on_loss=OnLoss.RECOMPUTE)
    made.arrived(decode())
    made.failed(R, Side.TAKE, LOST)
    made.returned(R, Side.TAKE)
    assert made.take_told() == [TakeLost(R, LOST, OnLoss.RECOMPUTE)]
    assert made.match(R, 0) == Match(0)
    made.take_tasks()
    made.allocated(R, TABLE, 0, 0)
    assert made.take_tasks() == []


def test_what_fails_before_blocks_are_there_fails_the_request_where_nothing_is_recomputed() -> None:
    made = policy()
    made.arrived(decode())
    made.failed(R, Side.TAKE, LOST)
    made.take_told()
    made.allocated(R, TABLE, 0, made.match(R, 0).tokens)
    assert made.take_told() == [LoadEnded(R, 0, LOST, ((10, 11, 12, 13),), OnLoss.FAIL)]


def test_a_transfer_that_ends_without_a_word_is_a_loss_too() -> None:
    made = loading(policy(), decode())
    made.returned(R, Side.TAKE)
    ((ended,),) = (made.take_told(),)
    assert isinstance(ended, LoadEnded)
    assert ended.loss is not None


# ---- what is given


def test_a_finished_prefill_is_handed_over_with_what_was_computed_and_kept_until_it_is_back() -> None:
    made = policy()
    assert made.arrived(prefill(prompt=50)).one_token
    assert made.finished(R, TABLE, 50, COMPLETE, step=9) == Finished(keep=True, handed_over=True)
    assert made.take_tasks() == [HandOver(R, ((10, 11, 12, 13),), 50, 9)]
    assert made.finished(R, TABLE, 50, COMPLETE) == Finished(keep=True, handed_over=True), "told twice"
    assert made.take_tasks() == []
    made.returned(R, Side.GIVE)
    assert made.take_told() == [SendEnded(R, None)]
    assert R not in made


def test_a_decode_engine_offers_all_that_has_kv_for_the_next_turn() -> None:
    made = loading(policy(), Arrival(R, 48, Take(PULL, 48), Give(PULL, prefill=False)))
    made.received(R)
    assert made.finished(R, TABLE, 66, COMPLETE).handed_over
    assert made.take_tasks() == [HandOver(R, TABLE, 66, 0)]


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
    assert made.take_tasks() == [HandOver(R, ((10, 11, 12),), 48, 0)]


@pytest.mark.parametrize("mode", [PULL, PUSH])
def test_what_did_not_finish_is_not_handed_over_and_whoever_waits_for_a_push_is_told(mode: Mode) -> None:
    made = policy()
    made.arrived(prefill(mode))
    assert made.finished(R, TABLE, 64, ABORTED) == FREE
    assert [type(task) for task in made.take_tasks()] == ([GiveUp] if mode is PUSH else [])
    assert R not in made


def test_a_push_that_is_given_up_after_its_first_parts_keeps_their_blocks_until_they_are_at_rest() -> None:
    made = policy()
    made.arrived(prefill(PUSH))
    made.computed(R, TABLE, 32, 1)
    assert made.aborted(R, "enough") == KEPT
    assert made.take_tasks()[1:] == [GiveUp(R, "enough")]
    made.returned(R, Side.GIVE)
    assert made.take_told() == [SendEnded(R, Loss(Reason.CANCELLED, "enough", Next.RECOMPUTE))]
    assert len(made) == 0


def test_a_push_sends_whole_blocks_as_they_are_computed_and_the_rest_at_the_end() -> None:
    made = policy()
    made.arrived(prefill(PUSH, prompt=70))
    made.computed(R, TABLE, 40, 1)
    made.computed(R, TABLE, 40, 1)
    made.computed(R, TABLE, 70, 2)
    assert made.finished(R, TABLE, 70, COMPLETE, 2).handed_over
    assert made.take_tasks() == [
        Part(R, ((10, 11),), None, last=False, after_step=1),
        Part(R, ((12, 13),), None, last=False, after_step=2),
        Part(R, ((14,),), None, last=True, after_step=2),
    ]


def test_a_push_whose_parts_all_went_ends_with_an_empty_one() -> None:
    made = policy()
    made.arrived(prefill(PUSH, prompt=32))
    made.computed(R, TABLE, 32, 1)
    made.finished(R, TABLE, 32, COMPLETE, 1)
    assert made.take_tasks()[-1] == Part(R, ((),), None, last=True, after_step=1)


def test_a_layer_wise_push_sends_each_part_in_ranges_of_layers() -> None:
    made = policy(layer_ranges=((0, 1), (1, 1)))
    made.arrived(prefill(PUSH, prompt=32))
    made.finished(R, TABLE, 32, COMPLETE, 1)
    blocks = ((10, 11),)
    assert made.take_tasks() == [
        Part(R, blocks, (0, 1), last=False, after_step=1),
        Part(R, blocks, (1, 1), last=True, after_step=1),
    ]


def test_a_part_lists_blocks_of_those_groups_only_that_have_its_layers() -> None:
    one = Group("one", GroupKind.FULL_ATTENTION, 1, 16, 64, 1, 8, "uint8")
    made = policy(one, layer_ranges=((0, 1), (1, 1)))
    made.arrived(prefill(PUSH, prompt=40))
    made.computed(R, TABLE, 32, 1)
    assert made.take_tasks() == [Part(R, ((10, 11),), (0, 1), last=False, after_step=1)]
    made.finished(R, TABLE, 40, COMPLETE, 2)
    assert made.take_tasks() == [
        Part(R, ((12,),), (0, 1), last=False, after_step=2),
        Part(R, ((),), (1, 1), last=True, after_step=2),
    ]


def test_a_decode_engine_pushes_what_it_has_at_its_end_only() -> None:
    made = policy()
    made.arrived(Arrival(R, 32, give=Give(PUSH, prefill=False)))
    made.computed(R, TABLE, 48, 1)
    assert made.take_tasks() == []
    made.finished(R, TABLE, 60, COMPLETE, 2)
    assert made.take_tasks() == [Part(R, (TABLE[0][:4],), None, last=True, after_step=2)]


def test_states_go_with_the_last_part() -> None:
    made = policy(FULL, STATE)
    made.arrived(prefill(PUSH, prompt=40))
    table = ((10, 11, 12), (5, 6))
    made.computed(R, table, 32, 1)
    made.finished(R, table, 40, COMPLETE, 2)
    assert made.take_tasks() == [
        Part(R, ((10, 11), ()), None, last=False, after_step=1),
        Part(R, ((12,), (6,)), None, last=True, after_step=2),
    ]


def test_a_preempted_prefill_starts_its_push_over() -> None:
    made = policy()
    made.arrived(prefill(PUSH, prompt=32))
    made.preempted(R)
    assert made.take_tasks() == [], "nothing was sent"
    made.computed(R, TABLE, 16, 1)
    made.preempted(R)
    made.preempted(R)
    made.computed(R, ((30, 31),), 32, 5)
    assert made.take_tasks()[1:] == [StartOver(R), Part(R, ((30, 31),), None, last=False, after_step=5)]


def test_a_push_that_fails_while_it_is_computed_sends_no_more_and_keeps_nothing_once_it_is_back() -> None:
    made = policy()
    made.arrived(prefill(PUSH))
    made.computed(R, TABLE, 32, 1)
    made.take_tasks()
    made.failed(R, Side.GIVE, LOST)
    made.computed(R, TABLE, 48, 2)
    assert made.take_tasks() == []
    made.returned(R, Side.GIVE)
    made.computed(R, TABLE, 64, 2)
    assert made.finished(R, TABLE, 64, COMPLETE, 2) == FREE
    assert (made.take_tasks(), made.take_told()) == ([], [])


# ---- aborts


def test_an_abort_before_blocks_are_there_ends_the_pull() -> None:
    made = policy()
    made.arrived(decode())
    made.take_tasks()
    assert made.aborted(R, "client left") == FREE
    assert made.take_tasks() == [Cancel(R, Side.TAKE, "client left")]
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
        made.received(R)
    else:
        made.failed(R, Side.TAKE, LOST)
        made.returned(R, Side.TAKE)
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
    assert made.take_tasks() == [Cancel(R, Side.GIVE, "nobody comes")]
    made.failed(R, Side.GIVE, LOST)
    made.returned(R, Side.GIVE)
    (ended,) = made.take_told()
    assert isinstance(ended, SendEnded)
    assert len(made) == 0


def test_hooks_of_requests_that_nobody_knows_change_nothing() -> None:
    made = policy()
    made.allocated(R, TABLE, 0, 64)
    made.computed(R, TABLE, 64, 1)
    made.preempted(R)
    assert made.finished(R, TABLE, 64, COMPLETE) == made.aborted(R) == FREE
    for news in (made.received, made.loaded):
        news(R)
    made.failed(R, Side.GIVE, LOST)
    made.returned(R, Side.TAKE)
    assert (made.take_tasks(), made.take_told(), len(made)) == ([], [], 0)


# ---- staged engines


def test_a_staged_engine_saves_what_each_step_computed_and_loads_what_came() -> None:
    made = policy(staged=True)
    made.arrived(prefill(prompt=40))
    made.computed(R, TABLE, 20, 1)
    made.computed(R, TABLE, 40, 2)
    made.finished(R, TABLE, 40, COMPLETE, 2)
    assert made.take_told() == [Save(R, ((10, 11),)), Save(R, ((11, 12),))]
    made = loading(policy(staged=True), decode())
    made.received(R)
    assert made.take_told() == [Load(R, ((10, 11, 12, 13),))]
    made.loaded(R)
    made.loaded(R)
    assert made.take_told() == [LoadEnded(R, 64, None, (), OnLoss.FAIL)]


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
    made.failed(R, Side.TAKE, LOST)
    made.finished(R, TABLE, 64, COMPLETE)
    made.take_told()
    assert made.match(R, 0) == Match(0)
    made.allocated(R, TABLE, 0, 0)
    assert made.take_told() == []


# ---- bounds


def test_an_arrival_may_come_twice_but_no_other_one_of_its_name() -> None:
    made = policy(requests_max=1)
    made.arrived(decode())
    made.arrived(decode())
    assert made.take_tasks() == [Begin(R, 64)]
    with refused(Reason.TRANSFER_EXISTS, AlreadyExists):
        made.arrived(decode(offer=48))
    with refused(Reason.TRANSFER_EXISTS, AlreadyExists):
        made.admits(decode(wanted="another prompt of as many tokens"))
    with refused(Reason.LIMIT_EXCEEDED, Exhausted):
        made.arrived(Arrival("another", 16))
    assert len(made) == 1
