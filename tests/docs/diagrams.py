"""The state diagrams of docs/architecture.md, made from the state tables of the core.

    .venv/bin/python -m tests.docs.diagrams      rewrites them

A diagram stands between two marks that name its table. `test_architecture.py` fails when one is stale.
"""

import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from kvgrpc.core.state import move
from kvgrpc.core.tables import accesses, leases, peers, transfers

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"

TABLES: dict[str, Mapping[Any, frozenset[Any]]] = {
    "kvgrpc.core.tables.transfers.STATES": transfers.STATES,
    "kvgrpc.core.tables.transfers.DISPOSITIONS": transfers.DISPOSITIONS,
    "kvgrpc.core.state.move.STAGES": move.STAGES,
    "kvgrpc.core.tables.leases.STATES": leases.STATES,
    "kvgrpc.core.tables.accesses.STATES": accesses.STATES,
    "kvgrpc.core.tables.peers.STATES": peers.STATES,
}
_MARKED = re.compile(r"(<!-- from ([\w.]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def diagram(table: Mapping[Enum, frozenset[Enum]]) -> str:
    """Returns a mermaid diagram. The first member is the beginning; a member without a successor is an end."""
    members = list(type(next(iter(table))))
    arrows = [("[*]", members[0].name)]
    for member in members:
        arrows += [(member.name, after.name) for after in members if after in table[member]]
        if not table[member]:
            arrows.append((member.name, "[*]"))
    return "\n".join(["stateDiagram-v2", *(f"    {before} --> {after}" for before, after in arrows)])


def names(page: str) -> list[str]:
    """Returns the tables that a page shows."""
    return [found[1] for found in _MARKED.findall(page)]


def renewed(page: str) -> str:
    """Returns the page with every diagram made anew."""
    return _MARKED.sub(lambda m: f"{m[1]}```mermaid\n{diagram(TABLES[m[2]])}\n```\n{m[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
