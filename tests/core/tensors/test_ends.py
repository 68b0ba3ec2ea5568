"""Ends of tensors, calls that come after an end, and tensors that are kept for others."""

import pytest

from kvgrpc.core.tensors.descriptions import ExpectedTensor
from kvgrpc.core.tensors.ended import Ended
from kvgrpc.core.tensors.rows import Purpose, TensorOffer
from kvgrpc.core.values.owners import ENGINE
from kvgrpc.errors import AlreadyExists, Exhausted, PreconditionFailed, Reason
from tests.core.tensors.made_tensors import KEY, OTHER, named, of_pages, store

ENDED, CANCELLED = Reason.TRANSFER_ENDED, Reason.CANCELLED


def test_the_end_of_a_request_frees_all_that_is_here_of_it_and_nothing_else() -> None:
    made = store()
    made.store("a", "b")
    made.store("a", key=OTHER)
    made.ask("a")
    made.arrive("c")
    made.offer("mine")
    assert made.release() == ["a", "b", "c", "mine"]
    assert made.dropped == [named("a"), named("b"), named("c")]
    assert made.withdrawn == [named("mine")]
    assert list(made.table.tensors) == [named("a", OTHER)]
    assert made.table.offers == {}


@pytest.mark.parametrize("reason", [ENDED, CANCELLED])
def test_what_comes_after_the_end_of_its_request_is_refused_for_a_while(reason: Reason) -> None:
    made = store(tombstone_s=50.0)
    made.release(reason=reason)
    for late in (lambda: made.arrive("a"), lambda: made.ask("b"), lambda: made.offer("c")):
        with pytest.raises(PreconditionFailed) as raised:
            late()
        assert raised.value.reason is reason
    made.pass_time(49.9)
    with pytest.raises(PreconditionFailed):
        made.arrive("a")
    made.pass_time(0.1)
    made.arrive("a")


def test_what_comes_after_its_own_release_is_refused_and_others_of_its_request_are_not() -> None:
    made = store()
    made.store("a")
    made.release("a", "never")
    for name in ("a", "never"):
        with pytest.raises(PreconditionFailed):
            made.arrive(name)
    made.arrive("b")


def test_who_waits_is_refused_when_the_request_ends() -> None:
    made = store()
    get, put = made.ask("a"), made.ask("b", Purpose.STORED)
    made.arrive("b")
    made.release()
    errors = [made.answers[get], made.answers[put]]
    assert all(isinstance(error, PreconditionFailed) and error.reason is ENDED for error in errors)


def test_a_release_of_more_tensors_than_are_remembered_refuses_everyone_who_waits() -> None:
    made = store(tombstones=1)
    waits = [made.ask(name) for name in "abc"]
    assert made.release(*"abc") == []
    assert [made.answers[wait].reason for wait in waits] == [ENDED] * 3
    assert len(made.table.waits) == 0


def test_a_release_by_name_refuses_who_waits_for_that() -> None:
    made = store()
    get, other = made.ask("a"), made.ask("b")
    assert made.release("a") == []
    assert list(made.answers) == [get]
    assert other not in made.answers


def test_a_cancel_leaves_what_the_engine_holds_until_it_is_released() -> None:
    made = store()
    made.store("held", "idle")
    made.ask("held")
    assert made.release(reason=CANCELLED) == ["idle"]
    assert made.stages() == {"held": "held"}
    with pytest.raises(PreconditionFailed):
        made.ask("held")
    assert made.release("held") == ["held"]
    assert made.dropped == [named("idle"), named("held")]


@pytest.mark.parametrize("when", ["before it comes", "when it is here", "when another caller has it"])
def test_what_the_engine_has_by_its_session_is_freed_by_that_alone(when: str) -> None:
    made = store()
    if when == "before it comes":
        made.ask("a", caller=ENGINE)
        made.ask("a")
    made.store("a")
    if when == "when another caller has it":
        made.ask("a")
    if when != "before it comes":
        made.ask("a", caller=ENGINE)
    assert (made.release("a"), made.release(), made.dropped) == ([], [], [])
    with pytest.raises(PreconditionFailed):
        made.ask("a", caller=ENGINE)
    assert made.release(caller=ENGINE) == ["a"]
    assert made.dropped == [named("a")]


def test_the_session_frees_what_any_caller_has() -> None:
    made = store()
    made.store("a", "b")
    made.ask("a")
    made.ask("b", caller=ENGINE)
    assert made.release("a") == ["a"]
    assert made.release(caller=ENGINE) == ["b"]


def test_more_ends_than_may_be_remembered_forget_the_oldest() -> None:
    ended = Ended(2, 10.0)
    for name in (b"1", b"2", b"1", b"3"):
        ended.end(name, "", ENDED, 0.0)
    assert [name for name, _ in ended] == [b"1", b"3"]
    ended.expire(10.0)
    assert (len(ended), ended.next_deadline()) == (0, None)


def test_an_offer_is_given_to_who_asks_for_it_once_it_stands() -> None:
    made = store()
    early = made.ask("a", Purpose.OFFERED)
    offer = made.offer("a")
    between = made.ask("a", Purpose.OFFERED)
    assert made.answers == {}
    made.table.offered(offer, b"token", "t-1")
    made.take()
    late = made.ask("a", Purpose.OFFERED)
    assert made.answers == dict.fromkeys((early, between, late), offer)
    made.table.offer_over(offer)
    made.table.offer_over(offer)
    assert not made.table.has_request(KEY)
    assert made.ask("a", Purpose.OFFERED) not in made.answers


def test_an_offer_that_is_made_again_is_the_same_one() -> None:
    made = store()
    assert made.offer("a") is made.offer("a")
    for other in ({"allocation": "b-2"}, {"pages": 2}, {"to": "consumer:1"}, {"count": 2}):
        with pytest.raises(AlreadyExists) as raised:
            made.offer("a", **other)
        assert raised.value.reason is Reason.TRANSFER_EXISTS


def test_a_put_to_other_consumers_is_not_the_one_to_these() -> None:
    made = store()
    offer = made.offer("a", to="consumer:1")
    with pytest.raises(AlreadyExists):
        made.offer("a", to="consumer:2")
    assert made.offer("a", to="consumer:1") is offer


def test_an_offer_that_is_over_is_the_same_one_for_who_puts_it_again_for_a_while() -> None:
    made = store(tombstone_s=50.0)
    offer = made.offer("a", to="consumer:1")
    made.table.offer_sent(offer, made.now)
    assert made.table.offers == {}
    assert made.offer("a", to="consumer:1") is offer
    assert made.table.offers == {}
    other = made.offer("a", allocation="b-2", to="consumer:1")
    assert other is not offer
    assert made.offer("a", to="consumer:1") is offer, "that put is over, whoever puts the tensor anew"
    made.table.offer_over(other)
    assert made.table.timers.next_deadline() == 50.0
    made.pass_time(50.0)
    assert made.offer("a", to="consumer:1") is not offer


def test_the_same_put_after_the_release_of_its_tensor_is_refused() -> None:
    made = store()
    made.table.offer_sent(made.offer("a"), made.now)
    made.release("a")
    with pytest.raises(PreconditionFailed) as raised:
        made.offer("a")
    assert raised.value.reason is ENDED


@pytest.mark.parametrize("remembered", [1, 8])
def test_who_was_given_a_tensor_that_is_released_before_the_call_returns_hears_that(remembered: int) -> None:
    made = store(tombstones=remembered)
    (tensor,) = made.store("a")
    made.ask("a")
    made.table.check_held(tensor)
    made.release("a", "b")
    with pytest.raises(PreconditionFailed) as raised:
        made.table.check_held(tensor)
    assert raised.value.reason is ENDED


def test_an_offer_and_a_tensor_of_others_never_have_one_name() -> None:
    made = store()
    made.offer("mine")
    made.store("theirs")
    for wrong in (lambda: made.arrive("mine"), lambda: made.offer("theirs"), lambda: made.ask("mine")):
        with pytest.raises(AlreadyExists) as raised:
            wrong()
        assert raised.value.reason is Reason.TRANSFER_EXISTS


def test_an_offer_that_is_not_what_is_asked_for_is_refused_to_both() -> None:
    made = store()
    asked = made.ask("a", Purpose.OFFERED, ExpectedTensor(dtype="float64"))
    with pytest.raises(PreconditionFailed):
        made.offer("a")
    made.take()
    assert made.answers[asked].reason is Reason.CONTENT_MISMATCH
    made.table.offered(made.offer("a"), b"token", "t-1")
    with pytest.raises(PreconditionFailed):
        made.ask("a", Purpose.OFFERED, ExpectedTensor(dtype="float64"))


def test_more_offers_than_may_be_are_refused_with_a_delay() -> None:
    made = store(tensors=1)
    made.offer("a")
    with pytest.raises(Exhausted):
        made.offer("b")


def test_an_offer_that_was_replaced_by_another_ends_alone() -> None:
    made = store()
    first = made.offer("a")
    made.table.offer_over(first)
    second = made.offer("a")
    made.table.offer_over(first)
    assert made.table.offers == {named("a"): second}
    assert second.made == made.now


def test_an_offer_says_which_pages_it_takes() -> None:
    made = store()
    offer = made.offer("a", pages=3)
    assert isinstance(offer, TensorOffer)
    assert made.table.check_size(of_pages(3)) == offer.pages == 3
