"""Assignments: the operator's file that gives roles and a tenant to callers, by their names.

    [[callers]]
    name = "spiffe://prod.example/ns/llm/sa/decode-*"
    roles = ["engine", "peer", "rank"]
    tenant = "acme"

The first row whose name fits counts. A caller without a row has no role. A name is whole, or has a star at the end or
behind its kind (`dns:*.ops.test`). A lone star is every caller with a name; callers without one are `anonymous`.
"""

import re
import tomllib
from typing import Any

from kvgrpc.core.values.owners import ANONYMOUS
from kvgrpc.core.values.records import dataclass
from kvgrpc.service.identity.names import KINDS
from kvgrpc.service.identity.patterns import ANY, check_pattern, matches
from kvgrpc.service.identity.roles import Role

ROWS_MAX = 4_096
"""Maximum number of rows."""
TENANT = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")
"""Form of a tenant's name: at most 63 characters, as a label in Kubernetes."""
_KEYS = {"name", "roles", "tenant"}


@dataclass(frozen=True)
class Assignment:
    """The roles and the tenant of callers with names of one pattern. The tenant is empty for callers of none."""

    kind: str
    """Beginning of the names, which says by which proof they are known; empty for every kind."""
    pattern: str
    """Pattern of what follows."""
    roles: frozenset[Role]
    tenant: str = ""

    def fits(self, name: str) -> bool:
        """Returns whether a caller has such a name."""
        if not self.kind:
            return self.pattern == name or (self.pattern == ANY and name != ANONYMOUS)
        return name.startswith(self.kind) and matches(self.pattern, name.removeprefix(self.kind))


NONE = Assignment("", ANY, frozenset())
"""Assignment of a caller without a row."""


class Assignments:
    """The rows of a file."""

    def __init__(self, rows: tuple[Assignment, ...]) -> None:
        self._rows = rows

    def of(self, name: str) -> Assignment:
        return next((row for row in self._rows if row.fits(name)), NONE)


def assignments_of(data: bytes) -> Assignments:
    """Returns the assignments of a file. Raises ValueError, which says which row is wrong."""
    said = tomllib.loads(data.decode())
    rows = said.pop("callers", [])
    if said or not isinstance(rows, list):
        raise ValueError("the file has rows [[callers]] and nothing else")
    if len(rows) > ROWS_MAX:
        raise ValueError(f"the file has {len(rows)} rows; the limit is {ROWS_MAX}")
    return Assignments(tuple(_row(number, row) for number, row in enumerate(rows, 1)))


def _row(number: int, row: Any) -> Assignment:
    where = f"row {number} of [[callers]]"
    if not isinstance(row, dict) or not {"name", "roles"} <= row.keys() <= _KEYS:
        raise ValueError(f"{where} has the keys name, roles and perhaps tenant")
    known = {role.value for role in Role}
    if not isinstance(row["roles"], list) or not all(isinstance(role, str) and role in known for role in row["roles"]):
        raise ValueError(f"{where} has a list of roles, of {', '.join(sorted(known))}")
    tenant = row.get("tenant", "")
    if not isinstance(tenant, str) or (tenant and not TENANT.fullmatch(tenant)):
        raise ValueError(f"{where} has a tenant that is not a label of small letters, digits, '.', '_' and '-'")
    try:
        kind, pattern = _split(row["name"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return Assignment(kind, pattern, frozenset(map(Role, row["roles"])), tenant)


def _split(name: Any) -> tuple[str, str]:
    """Returns the kind and the pattern of a row's name. A star that covered several kinds would let a token have the
    name of a certificate.
    """
    kind = next((kind for kind in KINDS if isinstance(name, str) and name.startswith(kind)), "")
    if kind:
        return kind, check_pattern(name.removeprefix(kind))
    if name not in (ANY, ANONYMOUS):
        raise ValueError(f"{name!r} begins with none of {', '.join(KINDS)}, and is neither {ANY} nor {ANONYMOUS}")
    return kind, name
