"""A tensor that fails to come: which callers are told, and which keep waiting."""

import pytest

from kvgrpc.core.tensors.rows import Fetch, Purpose
from kvgrpc.errors import InternalError, PreconditionFailed, Reason
from tests.core.tensors.made_tensors import named, store

LOST = InternalError(Reason.DATA_PATH_FAILED, "lost")


def test_one_that_failed_is_forgotten_and_may_be_put_again_while_who_asked_waits_on() -> None:
    made = store()
    asked = made.ask("a")
    lost = made.arrive("a")
    put = made.ask("a", Purpose.STORED)
    made.table.failed([lost], LOST, fetched=False)
    made.take()
    assert (made.answers, made.dropped) == ({put: LOST}, [named("a")])
    tensor = made.arrive("a")
    made.table.stored(tensor, made.now)
    made.take()
    assert made.answers[asked] is tensor


@pytest.mark.parametrize("reason", [Reason.NO_DATA_PATH, Reason.INCOMPATIBLE_POOLS])
def test_who_waits_for_a_put_hears_that_its_store_never_comes_by_one_but_not_while_it_is_put_by_itself_yet(
    reason: Reason,
) -> None:
    made, refused = store(), PreconditionFailed(reason, "these two do not fit")
    asked = made.ask("a")
    made.table.failed([made.arrive("a"), made.arrive("b")], refused, fetched=False)
    made.table.failed([made.arrive("a")], refused, fetched=True)
    made.take()
    assert made.answers == {}
    fetching = made.ask("a", fetches=True)
    made.table.failed([made.arrive("a")], refused, fetched=False)
    assert [effect.wait for effect in made.table.effects if isinstance(effect, Fetch)] == [fetching]
    made.take()
    assert made.answers == {asked: refused}


def test_of_one_that_was_put_and_failed_the_source_of_who_has_one_is_asked() -> None:
    made = store()
    asked, _ = made.ask("a", fetches=True), made.ask("a")
    made.table.failed([made.arrive("a")], LOST, fetched=False)
    assert [effect.wait for effect in made.table.effects if isinstance(effect, Fetch)] == [asked]


def test_one_that_was_fetched_and_failed_is_a_failure_to_who_asked_its_source_and_to_no_other() -> None:
    made = store()
    fetching, also, waiting = made.ask("a", fetches=True), made.ask("a", fetches=True), made.ask("a")
    made.table.failed([made.arrive("a")], LOST, fetched=True)
    made.take()
    assert made.answers == {fetching: LOST, also: LOST}
    tensor = made.arrive("a")
    made.table.stored(tensor, made.now)
    made.take()
    assert made.answers[waiting] is tensor


@pytest.mark.parametrize("comes", [False, True])
def test_a_source_that_refuses_ends_the_wait_of_that_call_unless_the_tensor_comes_from_elsewhere(comes: bool) -> None:
    made = store()
    asked, other, _ = made.ask("a", fetches=True), made.ask("a", fetches=True), made.ask("a")
    if comes:
        made.arrive("a")
    made.table.not_fetched(asked, LOST)
    made.take()
    assert made.answers == ({} if comes else {asked: LOST})
    made.table.waits.forget(other)
    made.table.not_fetched(other, LOST)
    made.take()
    assert other not in made.answers, "it has left"


def test_a_failure_that_comes_late_changes_nothing() -> None:
    made = store()
    made.table.failed(made.store("a"), LOST, fetched=True)
    made.take()
    assert made.stages() == {"a": "stored"}
