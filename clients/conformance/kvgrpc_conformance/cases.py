"""Loads cases from the files of `cases/`, and checks whether each is well formed."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import schema
from .values import CaseError, Json, names_in

FOLDER = Path(__file__).resolve().parents[1] / "cases"
FRAGMENTS = "fragments.json"
OPS = {
    "call": {"server", "request", "deadlineS", "metadata"},
    "open": {"server", "stream", "request", "metadata"},
    "send": {"request"},
    "finish": set(),
    "next": {"timeoutS"},
    "cancel": set(),
    "wait": {"server", "until", "timeoutS"},
    "watch": {"server", "filter", "after"},
    "watchEngine": {"server"},
    "keepAlive": {"server", "leases", "ttlS"},
    "kept": {"index", "timeoutS"},
    "stopKeeping": set(),
    "cleanUp": {"message"},
    "pull": {"server", "timeoutS"},
    "move": {"server", "to", "requestId", "timeoutS"},
    "redacted": {"request"},
    "connect": {"to", "tls", "token", "tokenFile"},
    "close": set(),
    "use": {"with"},
    "join": {"timeoutS"},
    "server": set(),
    "file": {"text"},
}
"""The steps by their op, with their other fields."""
JUDGED = {"save", "expect", "error", "withinS", "start", "note"}
SERVER_STEPS = {"restart", "stop", "kill", "begin", "cut", "uncut", "cutPeers", "uncutPeers", "health", "seen", "renew"}
LASTING = {"restart", "stop", "kill", "begin", "renew"}
"""Actions that change a server for good. A case with one of them has its own servers."""
BUILT_IN = frozenset({"id", "key", "key2", "key3", "address", "clients", "tls", "folder"})
DEFAULT_SERVERS: dict[str, Json] = {"P": {}, "D": {}}


@dataclass(frozen=True)
class Case:
    """One case of the suite."""

    name: str
    title: str
    area: str
    steps: list[dict[str, Json]]
    servers: dict[str, Json] = field(default_factory=lambda: dict(DEFAULT_SERVERS))
    own: bool = False
    """True for a case with servers that no other case has."""

    @property
    def group(self) -> str:
        """Name of the case's group. The cases of one group may share servers."""
        return json.dumps(self.servers, sort_keys=True)


def load(folder: Path = FOLDER) -> list[Case]:
    """Returns all cases, file by file. Raises CaseError."""
    fragments = json.loads((folder / FRAGMENTS).read_text())
    cases = []
    for path in sorted(folder.glob("*.json")):
        if path.name == FRAGMENTS:
            continue
        whole = json.loads(path.read_text())
        for row in whole["cases"]:
            try:
                cases.append(_case(row, whole, fragments))
            except (CaseError, KeyError, TypeError) as error:
                raise CaseError(f"{path.name}: {row.get('name')}: {error}") from error
    return cases


def _case(row: Mapping[str, Json], whole: Mapping[str, Json], fragments: Mapping[str, Json]) -> Case:
    steps = list(_with_fragments(row["steps"], fragments))
    lasting = any(LASTING & step["server"].keys() for step in steps if isinstance(step.get("server"), Mapping))
    unknown = row.keys() - {"name", "title", "servers", "own", "steps"}
    if unknown:
        raise CaseError(f"{', '.join(sorted(unknown))}: a case has no such field")
    servers = row.get("servers", whole.get("servers", DEFAULT_SERVERS))
    return Case(row["name"], row["title"], whole["area"], steps, servers, row.get("own", False) or lasting)


def _with_fragments(steps: list[dict[str, Json]], fragments: Mapping[str, Json]) -> Iterator[dict[str, Json]]:
    """Yields the steps, with fragments replaced by their steps. A `set` before these gives them their variables."""
    for step in steps:
        if "use" not in step:
            yield step
            continue
        if step["use"] not in fragments:
            raise CaseError(f"there is no fragment {step['use']!r}")
        fragment = fragments[step["use"]]
        yield {"set": {**fragment.get("with", {}), **step.get("with", {})}}
        yield from _with_fragments(fragment["steps"], fragments)


def faults(case: Case) -> list[str]:
    """Returns what is wrong with a case, as far as that shows without playing it."""
    known, streams = set(BUILT_IN), dict[str, str]()
    found = []
    if not case.title.endswith("."):
        found.append("its title is a rule, a whole sentence")
    for number, step in enumerate(case.steps):
        lines = list(_step_faults(step, case, known, streams))
        found += [f"step {number} ({op_of(step) or step}): {line}" for line in lines]
        known |= step.get("save", {}).keys() | step.get("set", {}).keys()
    return found


def connected(case: Case) -> set[str]:
    """Returns the names of the clients that the case's own steps connect."""
    return {step["connect"] for step in case.steps if "connect" in step}


def op_of(step: Mapping[str, Json]) -> str:
    """Returns the op of a step."""
    if "set" in step:
        return "set"
    for op in OPS:
        if op in step and (op != "server" or isinstance(step[op], Mapping)):
            return op
    return ""


def _step_faults(step: Mapping[str, Json], case: Case, known: set[str], streams: dict[str, str]) -> Iterator[str]:
    op = op_of(step)
    if op == "set":
        yield from (f"${name} is not known yet" for name in sorted(names_in(step["set"]) - known))
        return
    if not op:
        yield "it does nothing"
        return
    yield from (f"{op} has no {name}" for name in sorted(step.keys() - {op} - OPS[op] - JUDGED))
    yield from (f"${name} is not known yet" for name in sorted(names_in(dict(step)) - known))
    if "error" in step and "expect" in step:
        yield "it expects an answer and an error"
    if op == "server":
        yield from (f"{name} cannot be done to a server" for name in step["server"].keys() - SERVER_STEPS)
        yield from (f"there is no server {name}" for name in step["server"].values() if name not in case.servers)
    elif isinstance(step.get("server"), str) and step["server"] not in case.servers.keys() | connected(case):
        yield f"there is no server {step['server']}"
    elif op == "connect" and step.get("to", step[op]) not in case.servers:
        yield f"there is no server {step.get('to', step[op])}"
    yield from _message_faults(op, step, streams)


def _message_faults(op: str, step: Mapping[str, Json], streams: dict[str, str]) -> Iterator[str]:
    """Yields faults where requests and expected replies do not fit their messages."""
    if op in ("call", "open", "redacted"):
        method = schema.full_name(step[op])
        if method not in schema.methods():
            yield f"there is no method {method}"
            return
        yield from schema.request_faults(method, step.get("request", {}))
        if op == "open":
            streams[step["stream"]] = method
        elif op == "call":
            yield from schema.reply_faults(method, step.get("expect", {}).get("reply", {}))
    elif op == "pull":
        yield from schema.request_faults("kvgrpc.v1.HandoffService/PullBlocks", step[op])
    elif op == "move":
        yield from schema.request_faults("kvgrpc.v1.HandoffService/FinishedBlocks", {"forReaders": step[op]})
    else:
        yield from _stream_faults(op, step, streams)


def _stream_faults(op: str, step: Mapping[str, Json], streams: dict[str, str]) -> Iterator[str]:
    if op == "watch":
        streams[step[op]] = "kvgrpc.v1.TransferService/WatchTransfers"
        yield from schema.request_faults(streams[step[op]], {"filter": step.get("filter", {})})
    elif op == "watchEngine":
        streams[step[op]] = "kvgrpc.v1.HandshakeService/WatchEngine"
    elif op in ("send", "next", "finish", "cancel"):
        if step[op] not in streams:
            yield f"there is no stream {step[op]}"
        elif op == "send":
            yield from schema.request_faults(streams[step[op]], step["request"])
        elif op == "next":
            yield from schema.reply_faults(streams[step[op]], step.get("expect", {}).get("message", {}))


def methods_in(cases: list[Case]) -> set[str]:
    """Returns the RPCs that some case calls."""
    named = [
        schema.full_name(step[op]) for case in cases for step in case.steps for op in ("call", "open") if op in step
    ]
    watched = {"watch": "TransferService/WatchTransfers", "watchEngine": "HandshakeService/WatchEngine"}
    found = [schema.full_name(watched[op]) for case in cases for step in case.steps for op in watched if op in step]
    return {*named, *found}


def reasons_in(cases: list[Case]) -> set[str]:
    """Returns the reasons that some case expects, of an error or of a failure."""
    found: set[str] = set()
    for case in cases:
        for step in case.steps:
            found |= set(_reasons(step.get("error", {}))) | set(_reasons(step.get("expect", {})))
    return found


def _reasons(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _reasons(item)
    elif isinstance(value, list):
        for item in value:
            yield from _reasons(item)
    elif isinstance(value, str):
        yield value.removeprefix("FAILURE_REASON_")
