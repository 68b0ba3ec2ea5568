"""The history of a directory: every reader that goes on where it was knows what is there."""

import random
from collections import Counter

from kvgrpc.fleet.directory import Directory, DirectoryLimits, EngineState, LeadAnswer
from kvgrpc.fleet.history import EngineHistory, EngineRow, Shows
from tests.fleet.entries import entry, key_of, listing, proved


def everything(_: EngineRow) -> bool:
    return True


def of_tenant_a(row: EngineRow) -> bool:
    return row.entry.tenant in ("", "a")


def started(*names: str) -> tuple[Directory, EngineHistory]:
    directory = Directory()
    directory.listed(listing(*(entry(name) for name in names)))
    history = EngineHistory(directory)
    history.look(0.0)
    return directory, history


def test_rows_keep_their_order_and_their_numbers() -> None:
    directory, history = started("b", "a")
    directory.changed(key_of(entry("0")), entry("0").to_json(), 2)
    directory.changed(key_of(entry("b")), entry("b", draining=True).to_json(), 2)
    history.look(0.0)
    assert [row.entry.engine_id for row in history.rows(everything)] == ["b", "a", "0"]


def test_a_state_that_time_alone_changes_is_a_change() -> None:
    directory, history = started("a")
    proved(directory)
    assert history.look(0.0)
    assert [row.state for row in history.rows(everything)] == [EngineState.HEALTHY]
    assert not history.look(1.0)
    assert history.look(DirectoryLimits().proof_s + 0.1)
    (row,) = history.rows(everything)
    assert (row.state, row.why) == (EngineState.UNPROVEN, "no health check has been answered")


def test_a_load_alone_is_no_change_and_a_reason_is_one() -> None:
    directory, history = started("a")
    (check,) = directory.checks_due(0.0)
    directory.heard(check, LeadAnswer(load=0.5), 0.0)
    assert not history.look(0.0)
    directory.heard(check, LeadAnswer(why="it is away"), 0.0)
    directory.failed(check, 0.0)
    assert history.look(0.0)
    (row,) = history.rows(everything)
    assert (row.state, row.why) == (EngineState.FAILED, "it is away")


def test_an_engine_that_says_that_it_takes_no_work_drains() -> None:
    directory, history = started("a")
    (check,) = directory.checks_due(0.0)
    directory.heard(check, LeadAnswer(takes_work=False), 0.0)
    directory.answered(check, 0.0)
    history.look(0.0)
    assert history.counts("") == {EngineState.DRAINING: 1}


def test_several_changes_of_a_row_are_one_and_what_came_and_went_is_none() -> None:
    directory, history = started("a")
    begin = history.revision
    for number, draining in enumerate((True, False, True)):
        directory.changed(key_of(entry("a")), entry("a", draining=draining).to_json(), 2 + number)
        history.look(0.0)
    directory.changed(key_of(entry("b")), entry("b").to_json(), 9)
    history.look(0.0)
    directory.removed(key_of(entry("b")), 10)
    history.look(0.0)
    found = history.since(begin, everything)
    assert found is not None
    assert [row.entry.draining for row in found.rows] == [True]
    assert found.gone == ()


def test_a_revision_that_is_too_old_or_not_reached_needs_all_rows() -> None:
    directory = Directory()
    history = EngineHistory(directory, most=2)
    directory.listed(listing(*(entry(name) for name in "abcd")))
    history.look(0.0)
    assert history.since(1, everything) is None
    assert history.since(5, everything) is None
    assert history.since(-1, everything) is None
    found = history.since(2, everything)
    assert found is not None
    assert len(found.rows) == 2


def test_a_row_that_a_reader_does_not_see_any_more_is_gone_for_it_alone() -> None:
    directory, history = started("a")
    begin = history.revision
    directory.changed(key_of(entry("a")), entry("a", tenant="b").to_json(), 2)
    history.look(0.0)
    directory.changed(key_of(entry("b")), entry("b", tenant="b").to_json(), 3)
    history.look(0.0)
    directory.removed(key_of(entry("b")), 4)
    history.look(0.0)
    found = history.since(begin, of_tenant_a)
    assert found is not None
    assert (found.rows, found.gone) == ((), (key_of(entry("a")),))
    assert history.rows(of_tenant_a) == []


def test_a_reader_that_goes_on_at_any_time_knows_what_is_there() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        directory = Directory()
        history = EngineHistory(directory, most=rng.choice([3, 20, 1_000]))
        shows = rng.choice([everything, of_tenant_a])
        known: dict[str, EngineRow] = {}
        at, now = -1, 0.0
        for revision in range(60):
            now += rng.choice([0.0, 1.0, 20.0])
            one = entry(rng.choice("abcdef"), tenant=rng.choice(["", "a", "b"]), draining=rng.random() < 0.3)
            if rng.random() < 0.3:
                directory.removed(key_of(one), revision)
            else:
                directory.changed(key_of(one), one.to_json(), revision)
            if rng.random() < 0.5:
                proved(directory, now)
            history.look(now)
            if rng.random() < 0.4:
                news = history.since(at, shows)
                if news is None:
                    known = {row.key: row for row in history.rows(shows)}
                else:
                    known = {key: row for key, row in known.items() if key not in news.gone}
                    known |= {row.key: row for row in news.rows}
                at = history.revision
                assert known == {row.key: row for row in history.rows(shows)}, seed
            for tenant in ("", "a", "b", "nobody"):
                seen = [row for row in history.by_key().values() if not tenant or row.entry.tenant in ("", tenant)]
                assert history.counts(tenant) == Counter(row.state for row in seen), seed


def test_the_news_since_each_revision_are_the_differences_of_the_rows_then_and_now() -> None:
    for seed in range(20):
        rng, kept = random.Random(seed), 20
        directory = Directory()
        history = EngineHistory(directory, most=kept)
        then: dict[int, dict[str, EngineRow]] = {0: {}}
        for revision in range(60):
            one = entry(rng.choice("abcdef"), tenant=rng.choice(["", "a", "b"]), draining=rng.random() < 0.3)
            if rng.random() < 0.3:
                directory.removed(key_of(one), revision)
            else:
                directory.changed(key_of(one), one.to_json(), revision)
            history.look(0.0)
            then[history.revision] = dict(history.by_key())
            for at, before in then.items():
                for shows in (everything, of_tenant_a):
                    assert_news(history, at, before, shows, within=history.revision - at <= kept)


def assert_news(history: EngineHistory, at: int, before: dict[str, EngineRow], shows: Shows, *, within: bool) -> None:
    news = history.since(at, shows)
    assert (news is not None) is within
    if news is None:
        return
    old, new = ({key: row for key, row in rows.items() if shows(row)} for rows in (before, history.by_key()))
    told = {row.key: row for row in news.rows}
    assert old.keys() - new.keys() == set(news.gone)
    assert {key: row for key, row in new.items() if old.get(key) != row}.items() <= told.items() <= new.items()
