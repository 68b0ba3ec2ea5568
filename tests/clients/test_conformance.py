"""The conformance suite: its cases are well formed and complete, and its judge finds every mistake."""

import asyncio
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from clients.conformance.kvgrpc_conformance import cases, languages, report, schema
from clients.conformance.kvgrpc_conformance.cases import Case
from clients.conformance.kvgrpc_conformance.matching import mismatches
from clients.conformance.kvgrpc_conformance.proxy import Proxy
from clients.conformance.kvgrpc_conformance.run import LanguageRun, Outcome, Run
from clients.conformance.kvgrpc_conformance.values import CaseError, fill

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "clients" / "conformance" / "README.md"
SUITE = cases.load()
CASES_MIN = 90
UNTIL_S = 60


def excepted() -> set[str]:
    """Returns the reasons that the README lists as not covered by any case."""
    section = README.read_text().partition("## What no case brings about")[2]
    return set(re.findall(r"^\| ([A-Z_]+) \|", section, re.MULTILINE))


async def is_over(reader: asyncio.StreamReader) -> bool:
    """Waits for data or an end, and returns whether the other end has closed or reset the connection."""
    try:
        return await reader.read(1) == b""
    except ConnectionError:
        return True


def a_case(*steps: dict[str, Any]) -> Case:
    return Case("made up", "A rule.", "area", list(steps))


def test_cases_are_well_formed() -> None:
    wrong = [f"{case.name}: {fault}" for case in SUITE for fault in cases.faults(case)]
    assert wrong == []


def test_cases_have_names_of_their_own() -> None:
    names = [case.name for case in SUITE]
    assert len(names) == len(set(names)) >= CASES_MIN


def test_every_rpc_is_called_by_a_case() -> None:
    assert set(schema.methods()) - cases.methods_in(SUITE) == set()


def test_every_reason_is_in_a_case_or_has_its_exception() -> None:
    found = cases.reasons_in(SUITE)
    assert {reason for reason in schema.reasons() if reason not in found} == excepted()


GET, LIST = ({"call": f"LeaseService/{name}", "server": "P"} for name in ("GetLease", "ListLeases"))


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        ({"call": "LeaseService/Nothing", "server": "P"}, "there is no method"),
        (GET | {"server": "X"}, "there is no server X"),
        (GET | {"request": {"lease": {"id": "x"}}}, "has no such field"),
        (GET | {"request": {"lease": {"leaseId": "$lease"}}}, "$lease is not known"),
        (GET | {"expect": {"reply": {"leases": []}}}, "has no such field"),
        (GET | {"expect": {"reply": {"lease": {"state": "LIVE"}}}}, "is no LeaseState"),
        (LIST | {"request": {"pageSize": -1}}, "pageSize"),
        (LIST | {"expect": {"reply": {"leases": {"$lne": 1}}}}, "no test is called"),
        ({"next": "k"}, "there is no stream"),
        ({"server": {"reboot": "P"}}, "cannot be done"),
        ({"note": "a word"}, "it does nothing"),
    ],
)
def test_what_a_case_cannot_say_is_found(step: dict[str, Any], fault: str) -> None:
    (line, *_) = cases.faults(a_case(step))
    assert fault in line


def test_a_request_without_variables_is_one_of_its_method(subtests: pytest.Subtests) -> None:
    """Requests without variables parse as they stand. Requests with variables are parsed when they are played."""
    steps = [(case.name, step) for case in SUITE for step in case.steps if step.keys() & {"call", "open"}]
    for name, step in steps:
        with subtests.test(name), suppress(CaseError):
            schema.request(schema.full_name(step.get("call") or step["open"]), fill(step.get("request", {}), {}))


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        ({"a": 0, "b": "", "c": False, "d": {"e": 0}}, {}),
        ({"a": 5}, {"a": "5"}),
        ({"a": "2.5s"}, {"a": "2.500s"}),
        ({"a": {"$ge": 2, "$lt": "3s"}}, {"a": "2.000000001s"}),
        ({"a": {"$gt": None}}, {"a": "1"}),
        ({"a": {"$len": 2, "$has": {"b": 1}}}, {"a": [{"b": 1, "c": 2}, {"c": 2}]}),
        ({"a": {"$all": {"c": 2}, "$none": {"b": 9}}}, {"a": [{"b": 1, "c": 2}, {"c": 2}]}),
        ({"a": {"$one_of": ["x", {"$matches": "^y"}]}}, {"a": "yes"}),
        ({"a": {"$unset": True}, "b": {"$set": True}, "c": {"$not": 1}}, {"b": "", "c": 2}),
        ({"a": [{"b": 1}]}, {"a": [{"b": 1, "more": 2}]}),
    ],
)
def test_the_judge_accepts_what_is_as_expected(expected: object, found: object) -> None:
    assert mismatches(expected, found) == []


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        ({"a": 1}, {}),
        ({"a": "x"}, {"a": "y"}),
        ({"a": True}, {"a": 1}),
        ({"a": []}, {"a": [1]}),
        ({"a": [{"b": 1}]}, {"a": [{"b": 1}, {"b": 1}]}),
        ({"a": {"$gt": 0}}, {}),
        ({"a": {"$gt": None}}, {}),
        ({"a": {"$has": {"b": 1}}}, {"a": [{"b": 2}]}),
        ({"a": {"$set": True}}, {}),
        ({"a": {"$matches": "^x$"}}, {"a": "xx"}),
        ({"a": {"$unknown": 1}}, {"a": 1}),
        ({"a": {"b": 1}}, {"a": "b"}),
    ],
)
def test_the_judge_says_what_is_wrong(expected: object, found: object) -> None:
    assert mismatches(expected, found)


def test_values_are_filled_in_where_they_stand() -> None:
    variables = {"blocks": {"groups": [{"group": 3}]}, "seq": "41", "id": "ab"}
    made = fill(
        {"a": "$blocks.groups.0", "b": "${id}-r", "c": {"$add": ["$seq", 1]}, "d": {"$range": [5, 2]}}, variables
    )
    assert made == {"a": {"group": 3}, "b": "ab-r", "c": "42", "d": [5, 6]}
    with pytest.raises(CaseError, match="nothing"):
        fill("$missing", {})


async def test_a_cut_ends_connections_and_lets_none_stand_until_it_is_over() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            writer.write(await reader.read(100))
            await reader.read()
        writer.close()

    server, proxy = await asyncio.start_server(echo, "127.0.0.1", 0), Proxy()
    await proxy.start()
    proxy.target = server.sockets[0].getsockname()[1]
    host, _, port = proxy.address.partition(":")
    try:
        async with asyncio.timeout(UNTIL_S):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"x")
            assert await reader.read(1) == b"x"
            proxy.cut()
            assert await is_over(reader)
            writer.close()
            reader, writer = await asyncio.open_connection(host, port)
            assert await is_over(reader)
            writer.close()
            proxy.uncut()
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"y")
            assert await reader.read(1) == b"y"
            writer.close()
    finally:
        await proxy.close()
        server.close()
        await server.wait_closed()


def test_a_skipped_language_has_its_reason_and_passes_nothing() -> None:
    runs = [
        LanguageRun("python", "3.11", [Outcome(SUITE[0]), Outcome(SUITE[1], "it failed")]),
        LanguageRun("cobol", why="cobc is not on the PATH"),
    ]
    assert "SKIP: cobc is not on the PATH" in report.table(runs)
    rows = json.loads(report.as_json(runs))["languages"]
    assert rows[0] == {
        "language": "python",
        "version": "3.11",
        "cases": 2,
        "passed": 1,
        "failed": 1,
        "skipped": False,
        "why": "",
    }
    assert (rows[1]["skipped"], rows[1]["passed"]) == (True, 0)
    assert "not run" in report.matrix(runs)


def test_the_matrix_goes_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write_matrix([LanguageRun("python", "3.11", [Outcome(SUITE[0])])], page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| 1 of 1 |" in text
    assert "old" not in text
    page.write_text("no place")
    with pytest.raises(ValueError, match="no place"):
        report.write_matrix([], page)


async def test_a_language_that_is_not_there_is_skipped(tmp_path: Path) -> None:
    missing = languages.Language("cobol", start="cobol-executor", needs=("no-such-command",))
    unbuilt = languages.Language("python", start="{python} -c pass", built="no-such-file")
    alone = languages.Language("ada", start="ada-executor", fetch="echo no network; false", build="true")
    runs = await Run(SUITE[:1], tmp_path).languages([missing, unbuilt, alone])
    assert [run.why for run in runs] == [
        "no-such-command is not on the PATH",
        "./no-such-file is not built",
        "`echo no network; false` failed: no network",
    ]
    assert [run.outcomes for run in runs] == [[], [], []]


async def test_a_language_that_does_not_build_has_failed_all_cases(tmp_path: Path) -> None:
    broken = languages.Language("python", start="{python} -c pass", build="echo line 3: no such method; false")
    (run,) = await Run(SUITE[:2], tmp_path).languages([broken])
    assert (run.why, run.failed) == ("", 2)
    assert "line 3: no such method" in run.outcomes[0].failure


def test_languages_have_names_and_folders_of_their_own() -> None:
    found = languages.load()
    assert found[0].name == "python"
    assert len({language.name for language in found}) == len(found)


def test_answers_of_a_newer_server_are_messages_of_its_methods() -> None:
    for case in SUITE:
        for settings in case.servers.values():
            for method, rows in settings.get("answers", {}).items():
                for row in (one for many in rows for one in (many if isinstance(many, list) else [many])):
                    try:
                        schema.reply(schema.full_name(method), row.get("reply", {}))
                    except json_format.ParseError as error:
                        pytest.fail(f"{case.name}: {method}: {error}")
