"""Error lists of the schema: the codes and reasons with which proto/ says that each RPC, and each call between leads,
may be refused.
"""

import functools
import re
from pathlib import Path

PROTO = Path(__file__).parent.parent.parent / "proto"
_RPC = re.compile(r"^\s*rpc (\w+)\(")
_CALL = re.compile(r"^Request of (\w+), which ")
_SERVICE = re.compile(r"^service (\w+) ")
# Matches "CODE REASON, REASON: why" and "CODE: as elsewhere, and REASON with its why".
_PART = re.compile(r"(?P<code>[A-Z_]{4,})(?P<named>[^:]*):?(?P<rest>.*)")
_REASON = re.compile(r"\b[A-Z][A-Z_]{3,}\b")

# Errors of any call, which common.proto lists.
ANY_CALL = {
    ("ALREADY_EXISTS", "IDEMPOTENCY_KEY_REUSED"),
    ("RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED"),
    ("OUT_OF_RANGE", "LIMIT_EXCEEDED"),
    ("INVALID_ARGUMENT", "INVALID_FIELD"),
    ("UNAVAILABLE", "NO_POOL"),
    ("PERMISSION_DENIED", "NOT_OWNER"),
    ("PERMISSION_DENIED", "POLICY_DENIED"),
    ("PERMISSION_DENIED", "ROLE_MISSING"),
    ("UNAUTHENTICATED", "NOT_AUTHENTICATED"),
    ("FAILED_PRECONDITION", "DRAINING"),
    ("UNAVAILABLE", "ENGINE_LOST"),
    ("INTERNAL", "INTERNAL"),
    ("INTERNAL", "INTERNAL_DEFECT"),
    ("UNAVAILABLE", "INTERNAL_DEFECT"),
}


def errors_of(method: str) -> frozenset[tuple[str, str]]:
    """Returns the (code, reason) pairs that the schema lists for /package.Service/Method."""
    return frozenset(listed()[method.rpartition("/")[2]] | ANY_CALL)


@functools.cache
def listed() -> dict[str, set[tuple[str, str]]]:
    """Returns RPC name -> (code, reason) pairs, and the same of calls. Names are unique over all services."""
    comments = {name: text for path in PROTO.rglob("*.proto") for name, text in _comments(path.read_text())}
    return {name: _pairs(name, comments) for name in comments}


def _comments(source: str) -> list[tuple[str, str]]:
    """Returns (RPC, its comment with the service's errors of every call) for each RPC of a file. A call that is no RPC
    has the comment of its request.
    """
    found = []
    comment: list[str] = []
    shared = ""
    for line in source.splitlines():
        stripped = line.strip()
        if stripped.startswith("//"):
            comment.append(stripped.removeprefix("//").removeprefix(" "))
            continue
        text, comment = "\n".join(comment), []
        if _SERVICE.match(line):
            shared = text.partition("Errors of every call: ")[2]
        elif rpc := _RPC.match(line) or _CALL.match(text):
            found.append((rpc[1], f"{text}\n* {shared}" if shared else text))
    return found


def _pairs(name: str, comments: dict[str, str]) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for row in re.sub(r"\n +", " ", comments[name]).split("\n"):
        for part in row.removeprefix("* ").split(";") if row.startswith("* ") else ():
            stated = _PART.match(part.strip())
            if stated:
                reasons = _REASON.findall(stated["named"]) or _REASON.findall(stated["rest"])
                found |= {(stated["code"], reason) for reason in reasons}
    for other in re.findall(r"as (?:in )?(\w+)", comments[name].partition("Errors")[2]):
        if other in comments and other != name:
            found |= _pairs(other, comments)
    return found
