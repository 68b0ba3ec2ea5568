"""The policy of a scheduler as a destination: what it takes for a request that arrives, and when."""

from typing import Any

import pytest

from kvgrpc.core.policy.values import (
    Arrival,
    Begin,
    Give,
    LoadEnded,
    Match,
    ModeChoice,
    OnLoss,
    Reserve,
    Start,
    Take,
    TakeLost,
)
from kvgrpc.errors import AlreadyExists, Exhausted, InvalidRequest, Reason
from tests.core.nodes import refused
from tests.core.policy.policies import COMPLETE, FREE, FULL, PULL, PUSH, STATE, TABLE, R, decode, policy, prefill

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
    made.received(R, 70)
    made.received(R, 70)
    assert made.take_told() == [LoadEnded(R, 70, None, (), OnLoss.FAIL)]


@pytest.mark.parametrize(("came", "there"), [(48, 48), (16, 20), (70, 70), (96, 70)])
def test_what_came_of_a_prompt_that_goes_on_otherwise_is_there(came: int, there: int) -> None:
    made = policy()
    made.arrived(decode(offer=70, prompt=70))
    made.allocated(R, TABLE, 20, 50)
    made.received(R, came)
    assert made.take_told() == [LoadEnded(R, there, None, (), OnLoss.FAIL)]


def test_a_source_is_let_go_when_everything_was_found_here() -> None:
    made = policy()
    made.arrived(decode())
    made.allocated(R, TABLE, 64, 0)
    assert made.take_tasks() == [Begin(R, 64), Start(R, (), 0, 0)]
    made.received(R, 70)
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
def test_a_request_that_needs_all_its_outputs_takes_nothing_and_releases_its_source(mode: ModeChoice) -> None:
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


def test_from_a_state_there_is_no_way_back() -> None:
    """A state cannot be cut back, so each engine computes its own last token, and no token is computed twice."""
    made = policy(FULL, STATE, backoff_tokens=1)
    made.arrived(decode(offer=1, prompt=1))
    assert made.match(R, 0) == Match(0)
    assert made.take_tasks() == [Begin(R, 0), Start(R, (), 0, 0)], "the source is let go"
    made = policy(FULL, STATE, backoff_tokens=1)
    made.arrived(decode(PUSH, offer=1, prompt=1))
    assert made.take_tasks() == [Reserve(R, (), 1, 1, 0)]
    for history, tokens in ((198, 198), (199, 0), (200, 0)):
        made = policy(FULL, STATE, backoff_tokens=1)
        made.arrived(Arrival(R, 200, Take(PULL, history), Give(PULL)))
        assert made.match(R, 0) == Match(tokens), "of 200 tokens the last but one is what this engine computes"


@pytest.mark.parametrize(
    ("table", "computed", "external", "reason"),
    [
        (TABLE, 0, 32, Reason.INVALID_FIELD),
        (((1, 2, 3),), 0, 64, Reason.BLOCK_COUNT_MISMATCH),
        (((1, 2, 3, 4), (5,)), 0, 64, Reason.GROUP_MISMATCH),
    ],
)
def test_blocks_that_do_not_fit_are_refused_and_change_nothing(
    table: Any, computed: int, external: int, reason: Reason
) -> None:
    made = policy()
    made.arrived(decode())
    made.take_tasks()
    with refused(reason, InvalidRequest):
        made.allocated(R, table, computed, external)
    assert made.take_tasks() == []
    assert made.match(R, 0) == Match(64)


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
