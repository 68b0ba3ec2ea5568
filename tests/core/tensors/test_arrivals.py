"""Tensors that arrive: which are taken, which callers get them, and which are refused."""

from typing import Any

import pytest

from kvgrpc.core.tables.timers import STALE_MIN
from kvgrpc.core.tensors.descriptions import ExpectedTensor, NamedTensor
from kvgrpc.core.tensors.rows import Purpose, TensorStage
from kvgrpc.core.values.owners import ENGINE, SCHEDULER, of_tenant
from kvgrpc.errors import (
    AlreadyExists,
    DeadlineExceeded,
    Exhausted,
    InternalError,
    KVGrpcError,
    OutOfRange,
    PreconditionFailed,
    Reason,
)
from tests.core.tensors.made_tensors import KEY, OTHER, named, of_pages, store

LOST = InternalError(Reason.DATA_PATH_FAILED, "lost")


def test_a_tensor_that_is_here_is_given_at_once_and_held_from_then_on() -> None:
    made = store()
    (tensor,) = made.store("a")
    assert made.answers[made.ask("a")] is tensor
    assert made.stages() == {"a": "held"}


def test_who_asks_before_it_comes_has_it_when_it_is_stored_and_not_before() -> None:
    made = store()
    first, second = made.ask("a"), made.ask("a")
    tensor = made.arrive("a")
    assert made.answers == {}
    made.table.stored(tensor, made.now)
    made.take()
    assert made.answers == {first: tensor, second: tensor}
    assert made.stages() == {"a": "held"}


def test_got_twice_it_is_the_same_tensor_and_released_once() -> None:
    made = store()
    (tensor,) = made.store("a")
    assert made.answers[made.ask("a")] is made.answers[made.ask("a")] is tensor
    assert made.release("a") == ["a"]
    assert made.dropped == [named("a")]
    assert made.release("a") == []


def test_who_puts_it_hears_that_it_is_stored_and_nobody_holds_it_for_that() -> None:
    made = store()
    tensor = made.arrive("a")
    put = made.ask("a", Purpose.STORED)
    made.table.stored(tensor, made.now)
    made.take()
    assert made.answers == {put: tensor}
    assert made.stages() == {"a": "stored"}
    assert made.answers[made.ask("a", Purpose.STORED)] is tensor


def test_put_twice_it_is_one_tensor() -> None:
    made = store()
    made.arrive("a")
    assert made.table.arrive([NamedTensor(named("a"), of_pages())], "other:1", 1.0, made.now) == []
    assert len(made.table.tensors) == 1


def test_another_tensor_under_its_name_is_refused() -> None:
    made = store()
    made.arrive("a")
    with pytest.raises(AlreadyExists) as raised:
        made.table.arrive([NamedTensor(named("a"), of_pages(2))], "peer:1", 1.0, made.now)
    assert raised.value.reason is Reason.TRANSFER_EXISTS


def bundle(*names: str, pages: int = 1) -> list[NamedTensor]:
    return [NamedTensor(named(name), of_pages(pages)) for name in names]


def test_a_bundle_arrives_as_the_tensors_that_it_is_of() -> None:
    made = store(64)
    asked = made.ask("b")
    tensors = made.table.arrive(bundle("a", "b"), "peer:1", 1.0, made.now)
    for tensor in tensors:
        made.table.stored(tensor, made.now)
    made.take()
    assert made.stages() == {"a": "stored", "b": "held"}
    assert made.answers[asked] is tensors[1]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (bundle("new", "here"), Reason.TRANSFER_EXISTS),
        (bundle("new", "mine"), Reason.TRANSFER_EXISTS),
        (bundle("new", "ended"), Reason.TRANSFER_ENDED),
        (bundle("new", "other"), Reason.CONTENT_MISMATCH),
        (bundle("new", "new"), Reason.INVALID_FIELD),
        (bundle("new", "more", pages=17), Reason.LIMIT_EXCEEDED),
        (bundle("new", "large", pages=100), Reason.LIMIT_EXCEEDED),
        (bundle("new", "newer", "newest"), Reason.LIMIT_EXCEEDED),
    ],
    ids=lambda value: value.name if isinstance(value, Reason) else value[-1].id.name,
)
def test_a_bundle_of_which_one_is_refused_changes_nothing_and_nobody_else_hears_it(
    wrong: list[NamedTensor], reason: Reason
) -> None:
    made = store(64, tensors=3)
    made.store("here")
    made.offer("mine")
    made.release("ended")
    made.ask("other", expected=ExpectedTensor(dtype="float16"))
    before = (made.stages(), dict(made.answers))
    with pytest.raises(KVGrpcError) as raised:
        made.table.arrive(wrong, "peer:1", 1.0, made.now)
    made.take()
    assert (raised.value.reason, made.stages(), made.answers) == (reason, *before)


def test_a_bundle_that_fails_is_gone_but_for_what_was_dropped_before() -> None:
    made = store(64)
    tensors = made.table.arrive(bundle("a", "b"), "peer:1", 1.0, made.now)
    made.release("a")
    put = made.ask("b", Purpose.STORED)
    made.table.failed(tensors, LOST, fetched=False)
    made.take()
    assert (made.answers, made.dropped) == ({put: LOST}, [named("a"), named("b")])


def test_parts_and_requests_of_one_name_are_tensors_of_their_own() -> None:
    made = store()
    made.store("a")
    made.store("a", key=OTHER)
    assert made.table.arrive([NamedTensor(named("a", part=1), of_pages())], "peer:1", 1.0, made.now)
    assert len(made.table.tensors) == 3


def test_what_is_not_expected_is_refused_to_who_puts_it_and_to_who_asked() -> None:
    made = store()
    wrong, right = made.ask("a", expected=ExpectedTensor(dtype="float16")), made.ask("a")
    with pytest.raises(PreconditionFailed) as raised:
        made.arrive("a")
    made.take()
    assert raised.value.reason is Reason.CONTENT_MISMATCH
    assert list(made.answers) == [wrong]
    assert made.table.tensors == {}
    tensor = made.arrive("a")
    made.table.stored(tensor, made.now)
    made.take()
    assert made.answers[right] is tensor


def test_a_tensor_that_is_here_and_is_not_what_is_asked_for_is_refused_and_stays() -> None:
    made = store()
    made.store("a")
    with pytest.raises(PreconditionFailed):
        made.ask("a", expected=ExpectedTensor(layer=3))
    assert made.stages() == {"a": "stored"}


@pytest.mark.parametrize(("pages", "fits"), [(8, True), (9, False)])
def test_one_that_is_larger_than_the_store_is_refused_at_once(pages: int, fits: bool) -> None:
    made = store(pages=8)
    if fits:
        made.arrive("a", pages)
        return
    with pytest.raises(OutOfRange) as raised:
        made.arrive("a", pages)
    assert (raised.value.reason, raised.value.metadata["limit"]) == (Reason.LIMIT_EXCEEDED, "8")


def test_more_tensors_than_may_be_known_are_refused_with_a_delay() -> None:
    made = store(tensors=2)
    made.store("a", "b")
    with pytest.raises(Exhausted) as raised:
        made.arrive("c")
    assert raised.value.retry_delay_s
    made.release("a")
    made.arrive("c")


def test_more_waits_than_may_be_are_refused_with_a_delay() -> None:
    made = store(waits=1)
    made.ask("a")
    with pytest.raises(Exhausted) as raised:
        made.ask("b")
    assert (raised.value.reason, bool(raised.value.retry_delay_s)) == (Reason.QUEUE_FULL, True)


def test_one_tenant_has_its_share_of_the_waits_and_no_more() -> None:
    made = store(waits=4)
    red, blue = of_tenant("red", "one"), of_tenant("blue", "one")
    made.ask("a", payer=red)
    with pytest.raises(Exhausted, match="share of 4 is 2"):
        made.table.waits.check_room(red, 2)
    made.ask("b", payer=red)
    with pytest.raises(Exhausted) as raised:
        made.ask("c", payer=red)
    assert raised.value.reason is Reason.LIMIT_EXCEEDED
    made.ask("c", payer=blue)


def test_a_wait_ends_with_its_deadline_and_not_before() -> None:
    made = store()
    early, late = made.ask("a", wait_s=1.0), made.ask("a", wait_s=2.0)
    assert made.table.timers.next_deadline() == 1.0
    made.pass_time(0.999)
    assert made.answers == {}
    made.pass_time(0.001)
    assert list(made.answers) == [early]
    error: Any = made.answers[early]
    assert isinstance(error, DeadlineExceeded)
    assert error.metadata == {"phase": "tensor"}
    made.pass_time(1.0)
    assert list(made.answers) == [early, late]
    assert len(made.table.waits) == 0


def test_waits_that_are_over_leave_nothing_behind() -> None:
    made = store()
    for _ in range(10 * STALE_MIN):
        made.table.waits.forget(made.ask("a", wait_s=1000.0))
    assert len(made.table.timers._heap) <= STALE_MIN + 1
    assert made.table.timers.next_deadline() is None


def test_tensors_that_are_gone_leave_nothing_behind() -> None:
    made = store()
    for i in range(2 * STALE_MIN):
        made.store(f"t{i}")
        made.release(f"t{i}")
    assert len(made.table.timers._heap) <= STALE_MIN + 1
    assert made.table._own_ends._tensors == {}


def test_a_call_that_left_is_not_answered() -> None:
    made = store()
    made.table.waits.forget(made.ask("a"))
    made.table.waits.forget(99)
    made.store("a")
    made.pass_time(1000.0)
    assert made.answers == {}


def test_what_nobody_asks_for_ends_with_its_time_and_what_the_engine_holds_never() -> None:
    made = store()
    made.store("idle", "held")
    made.ask("held", caller=ENGINE)
    made.pass_time(99.9)
    assert made.stages() == {"idle": "stored", "held": "held"}
    made.pass_time(0.1)
    assert made.dropped == [named("idle")]
    made.pass_time(1e6)
    assert made.stages() == {"held": "held"}


def test_what_a_caller_by_rpc_holds_ends_when_it_does_not_ask_again_in_time() -> None:
    made = store(held_s=50.0)
    made.store("a")
    made.ask("a")
    made.pass_time(49.9)
    made.ask("a")
    made.pass_time(49.9)
    assert made.stages() == {"a": "held"}
    made.pass_time(0.2)
    assert made.dropped == [named("a")]


def test_what_the_engine_asks_for_too_is_the_engines_and_has_no_end() -> None:
    made = store(held_s=50.0)
    made.store("a", "b")
    made.ask("a")
    made.ask("a", caller=ENGINE)
    made.ask("b", caller=SCHEDULER)
    made.ask("b")
    made.pass_time(1e6)
    assert made.stages() == {"a": "held", "b": "held"}


def test_a_tensor_whose_caller_left_in_the_moment_of_its_answer_is_stored_as_before() -> None:
    made = store(held_s=50.0)
    (tensor,) = made.store("a")
    made.ask("a")
    made.table.not_taken(tensor, made.now)
    assert made.stages() == {"a": "stored"}
    made.pass_time(100.0)
    assert made.dropped == [named("a")]
    made.table.not_taken(tensor, made.now)
    assert made.stages() == {}


def test_a_tensor_that_the_engine_has_stays_the_engines_when_another_caller_leaves() -> None:
    made = store()
    (tensor,) = made.store("a")
    made.ask("a", caller=ENGINE)
    made.ask("a")
    made.table.not_taken(tensor, made.now)
    assert made.stages() == {"a": "held"}


def test_what_is_on_its_way_has_no_time_of_its_own() -> None:
    made = store()
    made.arrive("a", ttl_s=1.0)
    assert made.table.timers.next_deadline() is None
    made.pass_time(50.0)
    assert made.stages() == {"a": "arriving"}


def test_a_stage_that_cannot_follow_is_a_defect() -> None:
    made = store()
    (tensor,) = made.store("a")
    with pytest.raises(AssertionError):
        tensor.move_to(TensorStage.SPILLED, 0.0)


def test_the_same_events_have_the_same_effects() -> None:
    def play() -> list[str]:
        made = store(spill_pages=2)
        made.ask("b")
        made.store("a", "b", "c")
        made.release("a")
        made.pass_time(100.0)
        return [repr(sorted(made.stages().items())), repr(made.dropped), repr(list(made.answers))]

    assert play() == play()


def test_requests_are_known_while_something_of_them_is_here_or_waited_for() -> None:
    made = store()
    assert not made.table.has_request(KEY)
    wait = made.ask("a")
    assert made.table.has_request(KEY)
    made.table.waits.forget(wait)
    assert not made.table.has_request(KEY)
    made.store("a", "b")
    made.release("a")
    assert made.table.has_request(KEY)
    made.release("b")
    assert not made.table.has_request(KEY)


def test_errors_of_the_table_are_all_typed() -> None:
    made = store(tensors=1)
    made.store("a")
    for refused in (lambda: made.arrive("b"), lambda: made.offer("a"), lambda: made.arrive("c", 100)):
        with pytest.raises(KVGrpcError) as raised:
            refused()
        assert raised.value.message
