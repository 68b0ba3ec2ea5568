"""Idempotency keys: same caller, method, key and body give the same answer; keys are bounded, and kept long enough."""

from dataclasses import replace

import pytest

from kvgrpc.core.actions import Acknowledged, Reply
from kvgrpc.core.events import Call
from kvgrpc.core.idempotency import Begun, IdempotencyKeys
from kvgrpc.errors import AlreadyExists, Exhausted, Reason
from tests.core.nodes import refused

CALL = Call(1, "router", key="k", method="M", body=b"body")
ANSWER = Reply(1, Acknowledged(1), 7)


def again(number: int, call: Call = CALL) -> Call:
    return replace(call, id=number)


def test_a_call_without_a_key_is_answered_and_never_kept() -> None:
    keys = IdempotencyKeys(1)
    for number in (1, 2):
        assert keys.finish(number, ANSWER) == ([number], "")
    assert len(keys) == 0


def test_the_same_call_gets_the_same_answer() -> None:
    keys = IdempotencyKeys(9)
    assert keys.begin(CALL) is Begun.NEW
    calls, name = keys.finish(1, ANSWER)
    assert calls == [1]
    assert keys.reply(name) is ANSWER
    assert keys.begin(again(2)) is ANSWER


def test_a_call_that_still_runs_is_joined() -> None:
    keys = IdempotencyKeys(9)
    keys.begin(CALL)
    assert keys.begin(again(2)) is Begun.JOINED
    assert keys.begin(again(3)) is Begun.JOINED
    assert keys.finish(1, ANSWER)[0] == [1, 2, 3]


def test_another_body_under_the_same_key_is_refused() -> None:
    keys = IdempotencyKeys(9)
    keys.begin(CALL)
    for _ in range(2):
        with refused(Reason.IDEMPOTENCY_KEY_REUSED, AlreadyExists):
            keys.begin(replace(CALL, id=2, body=b"other"))
        keys.finish(1, ANSWER)


@pytest.mark.parametrize("change", [{"principal": "other"}, {"method": "N"}, {"key": "l"}])
def test_keys_of_other_callers_and_methods_have_nothing_to_do_with_it(change: dict[str, str]) -> None:
    keys = IdempotencyKeys(9)
    keys.begin(CALL)
    assert keys.begin(replace(again(2), **change)) is Begun.NEW  # type: ignore[arg-type]


def test_scopes_whose_parts_run_together_are_told_apart() -> None:
    keys = IdempotencyKeys(9)
    one = Call(1, "a\nb", key="d", method="c")
    two = Call(2, "a", key="d", method="b\nc")
    names = []
    for call in (one, two):
        assert keys.begin(call) is Begun.NEW
        names.append(keys.finish(call.id, ANSWER)[1])
    keys.forget(names[0])
    assert keys.begin(again(3, two)) is ANSWER
    assert keys.begin(again(4, one)) is Begun.NEW


def test_a_refusal_is_not_kept() -> None:
    keys = IdempotencyKeys(9)
    keys.begin(CALL)
    keys.begin(again(2))
    assert keys.finish(1, None) == ([1, 2], "")
    assert keys.begin(again(3)) is Begun.NEW


def test_a_full_table_still_joins_and_replays() -> None:
    keys = IdempotencyKeys(1)
    keys.begin(CALL)
    assert keys.begin(again(2)) is Begun.JOINED
    calls, _ = keys.finish(1, ANSWER)
    assert calls == [1, 2]
    assert keys.begin(again(3)) is ANSWER


def test_a_refusal_makes_room() -> None:
    keys = IdempotencyKeys(1)
    keys.begin(CALL)
    keys.finish(1, None)
    assert keys.begin(replace(again(2), key="l")) is Begun.NEW


def test_a_call_that_was_not_begun_is_answered_alone() -> None:
    """A full table or another body may have refused the call, or it may have joined: nobody else gets its answer."""
    keys = IdempotencyKeys(1)
    keys.begin(CALL)
    keys.begin(again(2))
    with refused(Reason.LIMIT_EXCEEDED) as _:
        keys.begin(replace(again(3), key="l"))
    assert keys.finish(2, None) == ([2], "")
    assert keys.finish(3, None) == ([3], "")
    assert keys.finish(1, ANSWER)[0] == [1, 2]


def test_every_kept_key_has_a_name_of_its_own() -> None:
    keys = IdempotencyKeys(9)
    names = []
    for number, text in enumerate("klm"):
        keys.begin(replace(again(number), key=text))
        names.append(keys.finish(number, Reply(number, Acknowledged(number), 0))[1])
    assert len(set(names)) == 3
    assert [keys.reply(name).answer for name in names] == [Acknowledged(0), Acknowledged(1), Acknowledged(2)]


def test_a_full_table_refuses_rather_than_forgets() -> None:
    keys = IdempotencyKeys(1)
    keys.begin(CALL)
    name = keys.finish(1, ANSWER)[1]
    with refused(Reason.LIMIT_EXCEEDED, Exhausted):
        keys.begin(replace(again(2), key="l"))
    assert keys.begin(again(3)) is ANSWER
    keys.forget(name)
    assert len(keys) == 0
    assert keys.begin(replace(again(4), key="l")) is Begun.NEW
