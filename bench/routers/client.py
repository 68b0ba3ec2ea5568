"""A client of a router: it asks and reads whatever comes, or hangs up."""

import http.client
import json
import socket
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bench.routers.cases import AT_ONCE, Case

ANSWER_S = 60.0
OK = "200"
CUT, UNREACHED, NO_ANSWER = "cut", "unreached", "200, no answer"
"""Values in place of an HTTP status: the answer ended too early, nobody answered, or what came is no answer."""


@dataclass(frozen=True)
class Said:
    """The result of a request."""

    status: str
    texts: tuple[str, ...] = ()
    """Whole answers, in order."""


def ask(url: str, case: Case, headers: Mapping[str, str]) -> Said:
    """Makes a request. Always returns, with any result."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=ANSWER_S)
    try:
        answer = _sent(connection, case, headers)
        if answer.status != http.client.OK:
            return Said(str(answer.status))
        texts = _streamed(answer) if case.streams else _whole(json.loads(answer.read()))
    except (http.client.IncompleteRead, ValueError):
        return Said(CUT)
    except (OSError, http.client.HTTPException):
        return Said(UNREACHED)
    finally:
        connection.close()
    return Said(OK, tuple(texts)) if texts else Said(NO_ANSWER)


def hang_up(url: str, case: Case, headers: Mapping[str, str]) -> None:
    """Sends a request, and hangs up as its case says."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=ANSWER_S)
    with suppress(OSError, http.client.HTTPException):
        if case.leaves == AT_ONCE:
            connection.request("POST", case.path, json.dumps(case.body), _with_type(headers))
        else:
            answer = _sent(connection, case, headers)
            answer.readline()
    if connection.sock is not None:
        with suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def _sent(connection: http.client.HTTPConnection, case: Case, headers: Mapping[str, str]) -> http.client.HTTPResponse:
    connection.request("POST", case.path, json.dumps(case.body), _with_type(headers))
    return connection.getresponse()


def _with_type(headers: Mapping[str, str]) -> dict[str, str]:
    return {"content-type": "application/json", **headers}


def _whole(answer: Any) -> list[str]:
    """Returns the texts of an answer in order; none if it is no answer."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    by_index = {choice["index"]: choice for choice in choices or ()}
    return [_text(by_index[index], "message") for index in sorted(by_index)]


def _streamed(answer: http.client.HTTPResponse) -> list[str]:
    """Returns the texts of a streamed answer, if every text has a reason for its end; else none."""
    texts: defaultdict[int, str] = defaultdict(str)
    ended = set()
    for line in answer:
        said = line.decode().strip().removeprefix("data:").strip()
        if not said.startswith("{"):
            continue
        for choice in json.loads(said).get("choices") or ():
            texts[choice["index"]] += _text(choice, "delta")
            if choice.get("finish_reason") == "length":
                ended.add(choice["index"])
    return [texts[index] for index in sorted(texts)] if texts.keys() == ended else []


def _text(choice: Mapping[str, Any], chat: str) -> str:
    return str(choice.get("text") or (choice.get(chat) or {}).get("content") or "")
