"""Entries and directories for the tests of the fleet."""

from dataclasses import replace

from kvgrpc.fleet.directory import Directory
from kvgrpc.fleet.entry import EngineEntry

ENTRY = EngineEntry(
    "p1", ("10.0.0.1:50051",), incarnation=7, life=1, model="m", layout="l", data_paths=("shm",), host="h1"
)  # fmt: skip


def listing(*entries: EngineEntry, revision: int = 1) -> list[tuple[str, bytes, int]]:
    """Returns a listing, with a key for each life."""
    return [(key_of(entry), entry.to_json(), revision) for entry in entries]


def key_of(entry: EngineEntry) -> str:
    return f"/engines/{entry.engine_id}/{entry.incarnation}"


def entry(engine_id: str = "p1", **changes: object) -> EngineEntry:
    return replace(ENTRY, engine_id=engine_id, **changes)  # type: ignore[arg-type] # checked by what reads it


def proved(directory: Directory, now: float = 0.0) -> Directory:
    """Answers all checks that are due."""
    for check in directory.checks_due(now):
        directory.answered(check, now)
    return directory
