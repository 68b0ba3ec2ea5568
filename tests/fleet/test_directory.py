"""The directory: what a source lists, which life of an engine counts, and which engines may be used."""

from dataclasses import replace

import pytest

from kvgrpc.errors import InvalidRequest
from kvgrpc.fleet.directory import Directory, DirectoryLimits, EngineState
from kvgrpc.fleet.entry import EngineEntry
from tests.fleet.entries import ENTRY, entry, key_of, listing, proved

KEY = key_of(ENTRY)


def directory(*entries: object, **limits: int) -> Directory:
    made = Directory(DirectoryLimits(**limits))
    made.listed(listing(*(entries or (ENTRY,))))  # type: ignore[arg-type] # entries
    return made


def state(of: Directory, engine_id: str = "p1", now: float = 0.0) -> EngineState:
    one = of.find(engine_id)
    assert one is not None
    return of.state(one, now)


# -- the source


def test_an_engine_whose_connection_ended_is_checked_next_and_is_healthy_until_then() -> None:
    directory = Directory()
    directory.listed(listing(entry("a"), entry("b")))
    first, _ = directory.checks_due(0.0)
    for check in (first, _):
        directory.answered(check, 0.0)
    assert directory.checks_due(1.0) == []
    directory.doubted(first, 0.5)
    assert directory.checks_due(0.9) == [], "a lead that ends each connection is asked once in `retry_s`"
    one = directory.find(first.engine_id)
    assert one is not None
    assert directory.state(one, 1.0) is EngineState.HEALTHY
    assert directory.checks_due(1.0) == [first]
    directory.removed(first.key, 2)
    directory.doubted(first, 1.0)


def test_a_listing_drops_what_it_lacks() -> None:
    made = directory(entry("a"), entry("b"))
    made.listed(listing(entry("b")))
    assert [one.entry.engine_id for one in made] == ["b"]


def test_a_source_that_is_down_keeps_the_last_list_and_its_age() -> None:
    made = proved(directory())
    assert made.stale_s(5.0) is None
    made.broken(5.0)
    made.broken(7.0)
    assert made.stale_s(9.0) == 4.0
    assert made.stale_s(1.0) == 0.0, "the clock went back"
    assert state(made, now=9.0) is EngineState.HEALTHY
    made.listed(listing(ENTRY))
    assert made.stale_s(9.0) is None


def test_a_listing_keeps_what_is_known_of_an_engine() -> None:
    made = proved(directory())
    made.listed(listing(ENTRY))
    assert state(made) is EngineState.HEALTHY


def test_a_directory_is_complete_after_the_first_listing() -> None:
    assert not Directory().complete
    assert directory().complete


def test_a_change_that_is_older_than_what_is_known_is_left_out() -> None:
    made = directory()
    made.changed(KEY, entry(draining=True).to_json(), 5)
    made.changed(KEY, ENTRY.to_json(), 4)
    assert state(made) is EngineState.DRAINING
    made.removed(KEY, 4)
    assert len(made) == 1
    made.removed(KEY, 6)
    made.removed(KEY, 7)
    assert (len(made), made.refusals.outdated) == (0, 2)


def test_a_registry_that_starts_anew_counts_from_the_beginning() -> None:
    made = Directory()
    made.listed(listing(ENTRY, revision=1_000))
    made.listed(listing(entry(draining=True), revision=2))
    assert state(made) is EngineState.DRAINING


def test_role_and_admission_are_looked_at_with_every_change() -> None:
    made = proved(directory())
    made.changed(KEY, entry(draining=True, role="decode").to_json(), 2)
    assert state(made) is EngineState.DRAINING
    made.changed(KEY, entry(role="decode").to_json(), 3)
    assert state(made) is EngineState.HEALTHY
    assert [one.entry.role for one in made] == ["decode"]


def test_an_entry_that_becomes_unreadable_is_dropped_and_counted() -> None:
    made = directory()
    made.changed(KEY, b"{}", 2)
    made.changed("k" * 601, ENTRY.to_json(), 2)
    assert (len(made), made.refusals.unreadable) == (0, 2)
    assert "key" in made.refusals.last


def test_the_number_of_entries_is_bounded() -> None:
    made = directory(*(entry(f"e{number}") for number in range(5)), entries=3)
    assert (len(made), made.refusals.too_many) == (3, 2)
    made.changed(key_of(entry("e0")), entry("e0", draining=True).to_json(), 2)
    assert state(made, "e0") is EngineState.DRAINING, "an entry that has a place changes"


# -- lives


def test_an_old_life_never_overwrites_a_newer_one() -> None:
    new, old = entry(life=2, incarnation=1), entry(life=1, incarnation=9)
    for first, second in ((new, old), (old, new)):
        made = directory(first)
        made.changed(key_of(second), second.to_json(), 2)
        proved(made)
        one = made.find("p1")
        assert one is not None
        assert one.entry == new
    made = directory(new)
    made.changed(key_of(new), old.to_json(), 2)
    assert [one.entry for one in made] == [new], "under one key, too"


def test_an_old_life_does_not_come_back_when_the_newer_one_has_gone() -> None:
    new, old = entry(life=2, incarnation=1), entry(life=1, incarnation=9)
    made = proved(directory(new))
    made.listed(listing(old))
    assert made.find("p1") is None
    assert [made.state(one, 0.0) for one in made] == [EngineState.OUTLIVED]
    assert made.checks_due(0.0) == []


def test_a_new_life_is_unproven() -> None:
    made = proved(directory())
    made.changed(KEY, entry(life=2, incarnation=8).to_json(), 2)
    assert state(made) is EngineState.UNPROVEN


def test_of_two_engines_with_one_id_the_newest_that_answered_counts() -> None:
    one, other = entry(incarnation=1, addresses=("a:1",)), entry(incarnation=2, addresses=("b:1",))
    made = directory(one, other, entry("alone"))

    def in_use() -> EngineEntry | None:
        found = made.find("p1")
        return None if found is None else found.entry

    assert in_use() == other
    _, of_one, of_other = made.checks_due(0.0)  # by their keys
    made.answered(of_one, 0.0)
    assert in_use() == one
    made.answered(of_other, 0.0)
    assert in_use() == other
    assert [made.state(row, 0.0) for row in made if row.entry == one] == [EngineState.OUTLIVED]
    assert "a:1" not in [check.address for check in made.checks_due(10.0)]


def test_a_newer_life_takes_the_place_of_an_older_one_when_it_answers() -> None:
    made = proved(directory())
    new = entry(life=2, incarnation=8, addresses=("new:1",))
    made.changed(key_of(new), new.to_json(), 2)
    (check,) = [check for check in made.checks_due(1.0) if check.address == "new:1"]
    found = made.find("p1")
    assert found is not None
    assert found.entry == ENTRY, "until then the older one is used"
    made.answered(check, 1.0)
    found = made.find("p1")
    assert found is not None
    assert (found.entry, made.state(found, 1.0)) == (new, EngineState.HEALTHY)
    assert {made.state(one, 1.0) for one in made} == {EngineState.HEALTHY, EngineState.OUTLIVED}


def test_a_life_that_never_answers_takes_no_place() -> None:
    """Whoever may write to the registry can name an engine's id, and a life that is newer than all."""
    made = proved(directory())
    liar = entry(life=1 << 52, incarnation=3, addresses=("liar:1",))
    made.changed(key_of(liar), liar.to_json(), 2)
    for now in (0.0, 10.0):
        found = made.find("p1")
        assert found is not None
        assert (found.entry, made.state(found, now)) == (ENTRY, EngineState.HEALTHY)
        for check in made.checks_due(now + 1.0):
            (made.failed if check.address == "liar:1" else made.answered)(check, now + 1.0)
    made.removed(key_of(liar), 3)
    assert state(made, now=11.0) is EngineState.HEALTHY, "nothing of it is remembered"


def test_the_memory_of_newest_lives_is_bounded() -> None:
    made = proved(directory(*(entry(f"e{number}", life=2, incarnation=9) for number in range(3)), outlived=2))
    made.listed(listing(entry("e0"), entry("e2")))
    assert made.find("e0") is not None, "forgotten"
    assert made.find("e2") is None


# -- health


def test_health_is_asked_before_an_engine_is_used() -> None:
    made = directory()
    assert state(made) is EngineState.UNPROVEN
    (check,) = made.checks_due(0.0)
    assert (check.address, check.engine_id, check.incarnation) == ("10.0.0.1:50051", "p1", 7)
    assert made.checks_due(0.5) == [], "one at a time"
    made.answered(check, 0.5)
    assert state(made, now=0.5) is EngineState.HEALTHY
    assert made.checks_due(5.4) == []
    assert len(made.checks_due(5.5)) == 1


def test_a_failure_puts_an_engine_out_of_use_until_it_answers_again() -> None:
    made = directory()
    (check,) = made.checks_due(0.0)
    made.answered(check, 0.0)
    made.failed(check, 1.0)
    assert state(made, now=1.0) is EngineState.FAILED
    assert made.checks_due(1.5) == []
    (check,) = made.checks_due(2.0)
    made.failed(check, 2.0)
    assert state(made, now=2.0) is EngineState.FAILED
    (check,) = made.checks_due(3.0)
    made.answered(check, 3.0)
    assert state(made, now=3.0) is EngineState.HEALTHY


def test_an_answer_counts_for_a_time_and_not_before_it() -> None:
    made = proved(directory(), 100.0)
    assert [state(made, now=now) for now in (115.0, 115.1, 99.0)] == [
        EngineState.HEALTHY, EngineState.UNPROVEN, EngineState.UNPROVEN,
    ]  # fmt: skip


def test_an_answer_to_a_check_of_an_earlier_entry_proves_nothing() -> None:
    made = directory()
    (check,) = made.checks_due(0.0)
    made.changed(KEY, entry(addresses=("b:1",)).to_json(), 2)
    made.answered(check, 0.0)
    made.failed(check, 0.0)
    made.answered(replace(check, key="gone"), 0.0)
    assert state(made) is EngineState.UNPROVEN


def test_a_load_is_a_number_from_zero() -> None:
    made = directory()
    made.loaded("p1", 0.5, 0.0)
    made.loaded("unknown", 0.5, 0.0)
    for load in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidRequest):
            made.loaded("p1", load, 0.0)
    assert [one.load for one in made] == [0.5]


def test_an_entry_is_touched_by_each_change_that_a_reader_may_see_and_by_no_other() -> None:
    made = directory(ENTRY, entry("other"))
    assert made.take_touched(0.0) == [KEY, key_of(entry("other"))]
    proved(made)
    assert len(made.take_touched(0.0)) == 2
    proved(made, 5.0)
    assert made.take_touched(5.0) == []
    (check,) = [check for check in made.checks_due(10.0) if check.key == KEY]
    made.failed(check, 10.0)
    assert made.take_touched(10.0) == [KEY]
    made.changed(KEY, entry(draining=True).to_json(), 2)
    assert made.take_touched(10.0) == [KEY]
    made.removed(KEY, 3)
    assert made.take_touched(10.0) == [KEY]
    assert made.take_touched(20.0) == []
    assert made.take_touched(20.1) == [key_of(entry("other"))], "its proof is too old"
