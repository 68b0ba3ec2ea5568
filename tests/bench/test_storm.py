"""`make storm`: the requests of a seed, the errors that it finds, and its report. tests/vllm runs a real one."""

import json
from dataclasses import replace
from typing import Any

import pytest

from bench.storm.options import parsed
from bench.storm.outcomes import ANSWERED, CUT, HUNG_UP, Expected, Outcome, wrong_from
from bench.storm.result import Found, Left, as_json, found, table
from bench.storm.schedule import (
    ANSWER_TOKENS_MAX,
    HANG_UP_S_MAX,
    HANG_UP_S_MIN,
    PROMPT_TOKENS_MAX,
    StormRequest,
    schedule,
)
from tests.vllm.engines import BLOCK_TOKENS

RIGHT: Expected = {(5, 6, 7): (10, 11, 12, 13)}
ASKED = StormRequest(0, (5, 6, 7), answer_tokens=3, streams=True, pause_s=0.0, hang_up_s=None)
LEFT = Left({"P": 0, "D": 3}, None, 7, 2)
COUNT_KEYS = {"answers", "wrong", "wrong_at_first", "statuses", "held", "reclaimed", "reclaimed_in_vain"}
WANTED_KEYS = {*COUNT_KEYS, "median_s", "p95_s", "slowest_s"}


def outcome(*tokens: int, status: str = ANSWERED, seconds: float = 1.0, number: int = 0) -> Outcome:
    return Outcome(replace(ASKED, number=number), status, tokens, seconds, 0.0)


def summary(*outcomes: Outcome) -> Found:
    return found(outcomes, RIGHT, LEFT, kills=1, storm_s=2.0)


# -- the schedule


def test_a_seed_always_asks_the_same_and_another_one_does_not() -> None:
    assert schedule(1, 100, 0.5, 2) == schedule(1, 100, 0.5, 2)
    assert schedule(1, 100, 0.5, 2).requests[0].prompt != schedule(2, 100, 0.5, 2).requests[0].prompt


def test_a_longer_storm_begins_like_a_shorter_one() -> None:
    assert schedule(1, 300, 0.5, 0).requests[:100] == schedule(1, 100, 0.5, 0).requests


def test_hang_ups_and_kills_change_nothing_else() -> None:
    many, none = schedule(1, 200, 0.9, 3), schedule(1, 200, 0.0, 0)
    assert [replace(request, hang_up_s=None) for request in many.requests] == list(none.requests)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_about_the_share_that_is_asked_for_hangs_up_at_times_within_bounds(share: float) -> None:
    moments = [request.hang_up_s for request in schedule(1, 1000, share, 0).requests if request.hang_up_s is not None]
    assert len(moments) == pytest.approx(1000 * share, abs=50 if 0 < share < 1 else 0)
    assert all(HANG_UP_S_MIN <= moment <= HANG_UP_S_MAX for moment in moments)


def test_prompts_are_around_borders_of_blocks_and_share_prefixes() -> None:
    requests = schedule(1, 1000, 0.5, 0).requests
    assert {len(request.prompt) % BLOCK_TOKENS for request in requests} == set(range(BLOCK_TOKENS))
    near = [request for request in requests if (len(request.prompt) + 2) % BLOCK_TOKENS <= 4]
    assert len(near) > 500
    assert max(len(request.prompt) for request in requests) <= PROMPT_TOKENS_MAX
    assert max(request.answer_tokens for request in requests) <= ANSWER_TOKENS_MAX
    assert len({request.prompt[:8] for request in requests}) < 50
    assert 800 < len({request.prompt for request in requests}) < 950


def test_requests_come_in_bursts() -> None:
    pauses = [request.pause_s for request in schedule(1, 1000, 0.5, 0).requests]
    assert 100 < sum(pause > 0 for pause in pauses) < 300


def test_kills_are_spread_over_the_storm() -> None:
    assert schedule(1, 100, 0.5, 3).kills == (25, 50, 75)
    assert schedule(1, 100, 0.5, 0).kills == ()


# -- comparing


@pytest.mark.parametrize(
    ("status", "tokens", "at"),
    [
        (ANSWERED, (10, 11, 12), None),
        (ANSWERED, (9, 11, 12), 0),
        (ANSWERED, (10, 11, 13), 2),
        (ANSWERED, (10, 11), 2),
        (ANSWERED, (10, 11, 12, 13), 3),
        (ANSWERED, (), 0),
        (HUNG_UP, (10, 11), None),
        (HUNG_UP, (10, 12), 1),
        (HUNG_UP, (10, 11, 12, 13), 3),
        (CUT, (), None),
        ("500", (), None),
    ],
)
def test_a_whole_answer_is_right_to_its_end_and_a_part_as_far_as_it_goes(
    status: str, tokens: tuple[int, ...], at: int | None
) -> None:
    assert wrong_from(outcome(*tokens, status=status), RIGHT) == at


# -- the summary


def test_the_summary_counts_whole_answers_parts_and_what_is_wrong_in_either() -> None:
    got = summary(
        outcome(10, 11, 12, number=0),
        outcome(10, 11, 9, number=1),
        outcome(9, status=HUNG_UP, number=2),
        outcome(status=HUNG_UP, number=3),
        outcome(status="500", number=4),
    )
    assert (got.sent, got.answers, got.parts) == (5, 2, 1)
    assert (got.wrong, got.wrong_at_first, got.wrong_from, got.wrong_requests) == (2, 1, (2, 0), (1, 2))
    assert got.statuses == {"200": 2, "500": 1, "hung up": 2}


def test_times_are_those_of_whole_answers() -> None:
    answers = [outcome(10, 11, 12, seconds=float(number), number=number) for number in range(1, 101)]
    got = summary(*answers, outcome(status=HUNG_UP, seconds=900.0), outcome(status="500", seconds=900.0))
    assert (got.median_s, got.p95_s, got.slowest_s) == (50.5, 95.0, 100.0)
    assert got.slowest_requests == (100, 99, 98, 97, 96)


def test_a_storm_without_answers_has_no_times() -> None:
    got = summary(outcome(status="500"))
    assert (got.answers, got.median_s, got.p95_s, got.slowest_s) == (0, None, None, None)


def test_json_has_these_names_for_each_connector_and_says_what_ran() -> None:
    said = json.loads(as_json({"kvgrpc": summary(outcome(10, 11, 12)), "nixl": summary()}, {"seed": 1}))
    assert said.keys() == {"kvgrpc", "nixl", "seed", *said["kvgrpc"]}
    assert {name: said[name] for name in said["kvgrpc"]} == said["kvgrpc"]
    assert said["kvgrpc"].keys() >= WANTED_KEYS
    left = {"held": 3, "held_at": {"P": 0, "D": 3}, "settled_s": None, "reclaimed": 7, "reclaimed_in_vain": 2}
    assert said["kvgrpc"].items() >= left.items()


def test_a_person_gets_a_row_for_each_figure_and_a_column_for_each_connector() -> None:
    head, *lines = table({"kvgrpc": summary(outcome(10, 11, 12)), "nixl": summary()}, {"seed": 1})
    assert head.split() == ["kvgrpc", "nixl"]
    rows: dict[str, Any] = {line.split()[0]: line.split()[1:] for line in lines}
    assert rows["answers"] == ["1", "0"]
    assert rows["median_s"] == ["1.0", "-"]
    assert rows["held"] == ["3"] * 2
    assert rows["held_at"] == ["P:0", "D:3"] * 2


# -- options


def test_defaults_depend_on_what_is_asked_for() -> None:
    assert (parsed("", []).connector, parsed("", []).kills) == ("kvgrpc", 4)
    assert parsed("", ["--requests", "200"]).kills == 0


@pytest.mark.parametrize(
    "arguments",
    [
        "--requests 0",
        "--hang-ups 1.5",
        "--blocks 5",
        "--requests 20 --kills 1",
        "--kills -1",
        "--mode push --connector nixl",
    ],
)
def test_what_makes_no_storm_is_refused_before_anything_starts(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed("", arguments.split())
    assert arguments.split()[-2 if "push" not in arguments else 0] in capsys.readouterr().err
