"""gRPC's own authorization policy (gRFC A43): a JSON file that servers in Go, C++ and Java also read.

    {"name": "leads", "deny_rules": [...], "allow_rules": [{"name": "routers",
      "source": {"principals": ["spiffe://prod/router-*"]}, "request": {"paths": ["/kvgrpc.v1.PoolService/*"]}}]}

A call that matches a deny rule is refused; else a call that matches an allow rule goes on; else it is refused. A rule
matches if all that it states matches. Of a list one item is enough, but every header must match.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from kvgrpc.core.values.records import dataclass
from kvgrpc.service.identity.patterns import check_pattern, matches

RULES_MAX = 1_024
"""Maximum number of rules of each kind."""
_FORBIDDEN = frozenset({"host", "connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"})
"""Headers that no rule may ask for, as in gRPC: they say how a message travels."""

Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True)
class Rule:
    """One rule. An empty list matches every call."""

    name: str
    principals: tuple[str, ...]
    paths: tuple[str, ...]
    headers: tuple[tuple[str, tuple[str, ...]], ...]

    def fits(self, principal: str, path: str, headers: Mapping[str, str]) -> bool:
        """Returns whether the rule matches a call. `principal` is empty for a caller without a name."""
        return (
            (not self.principals or any(bool(principal) and matches(one, principal) for one in self.principals))
            and (not self.paths or any(matches(one, path) for one in self.paths))
            and all(
                name in headers and any(matches(value, headers[name]) for value in values)
                for name, values in self.headers
            )
        )


@dataclass(frozen=True)
class AuthorizationPolicy:
    """The rules of a file."""

    name: str
    deny: tuple[Rule, ...]
    allow: tuple[Rule, ...]

    def refusal(self, principal: str, path: str, metadata: Metadata) -> str:
        """Returns why a call is refused; empty if it may go on."""
        headers: dict[str, str] = {}
        for key, value in metadata:
            if isinstance(value, str):  # gRPC does not match binary headers
                headers[key] = f"{headers[key]},{value}" if key in headers else value
        for rule in self.deny:
            if rule.fits(principal, path, headers):
                return f"rule {rule.name} of policy {self.name} denies it"
        if any(rule.fits(principal, path, headers) for rule in self.allow):
            return ""
        return f"no rule of policy {self.name} allows it"


def policy_of(data: bytes) -> AuthorizationPolicy:
    """Returns the policy of a file. Raises ValueError, which says what is wrong."""
    said = _table(json.loads(data), "the policy", {"name", "allow_rules"}, {"deny_rules"})
    return AuthorizationPolicy(
        _text(said["name"], "name"),
        _rules(said.get("deny_rules", []), "deny_rules", least=0),
        _rules(said["allow_rules"], "allow_rules", least=1),
    )


def _rules(rows: Any, where: str, least: int) -> tuple[Rule, ...]:
    if not isinstance(rows, list) or not least <= len(rows) <= RULES_MAX:
        raise ValueError(f"{where} is a list of {least} to {RULES_MAX} rules")
    return tuple(_rule(row, f"{where}[{number}]") for number, row in enumerate(rows))


def _rule(row: Any, where: str) -> Rule:
    said = _table(row, where, {"name"}, {"source", "request"})
    source = _table(said.get("source", {}), f"{where}.source", set(), {"principals"})
    request = _table(said.get("request", {}), f"{where}.request", set(), {"paths", "headers"})
    rows = _list(request.get("headers", []), f"{where}.request.headers")
    headers = tuple(_header(one, f"{where}.request.headers[{number}]") for number, one in enumerate(rows))
    return Rule(
        _text(said["name"], f"{where}.name"),
        _patterns(source.get("principals", []), f"{where}.source.principals"),
        _patterns(request.get("paths", []), f"{where}.request.paths"),
        headers,
    )


def _header(row: Any, where: str) -> tuple[str, tuple[str, ...]]:
    said = _table(row, where, {"key", "values"}, set())
    key, values = _text(said["key"], f"{where}.key").lower(), _patterns(said["values"], f"{where}.values")
    if key in _FORBIDDEN or key.startswith((":", "grpc-")) or key.endswith("-bin"):
        raise ValueError(f"{where}.key {key!r} cannot be asked for")
    if not values:
        raise ValueError(f"{where}.values has a value")
    return key, values


def _patterns(rows: Any, where: str) -> tuple[str, ...]:
    try:
        return tuple(check_pattern(row) for row in _list(rows, where))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _list(value: Any, where: str) -> list[Any]:
    if isinstance(value, list):
        return value
    raise ValueError(f"{where} is a list")


def _table(row: Any, where: str, needed: set[str], others: set[str]) -> dict[str, Any]:
    if not isinstance(row, dict) or not needed <= row.keys() <= needed | others:
        must, may = ", ".join(sorted(needed)) or "none", ", ".join(sorted(others)) or "none"
        raise ValueError(f"{where} is an object; keys that it must have: {must}; that it may have: {may}")
    return row


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where} is a text that is not empty")
    return value
