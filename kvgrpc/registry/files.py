"""A registry that needs no server: a file that is looked at again and again."""

import asyncio
import json
import tomllib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from kvgrpc.errors import InvalidRequest, invalid
from kvgrpc.fleet.entry import EngineEntry, entry_of
from kvgrpc.registry.base import RegistryListing, RegistryNews, down

FILE_BYTES_MAX = 8 << 20
"""Maximum size of a file of entries, in bytes."""
LOOK_S = 1.0
"""Time between two looks at a file, in seconds."""


class FileRegistry:
    """A TOML or JSON file with a list `engines`. A file that cannot be read is a registry that is down: what it said
    before stays in use.
    """

    def __init__(self, path: Path, look_s: float = LOOK_S) -> None:
        self._path = path
        self._look_s = look_s

    async def watch(self) -> AsyncIterator[RegistryNews]:
        told: bytes | None = None
        revision = 0
        while True:
            data = await asyncio.to_thread(self._read)
            if data != told:
                told, revision = data, revision + 1
                # In a thread, because a large file of TOML takes seconds.
                yield _listing(await asyncio.to_thread(self._entries, data), revision)
            await asyncio.sleep(self._look_s)

    async def close(self) -> None:
        pass

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                data = file.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            raise down(error) from error
        if len(data) > FILE_BYTES_MAX:
            raise down(f"{self._path} has more than {FILE_BYTES_MAX} bytes")
        return data

    def _entries(self, data: bytes) -> list[EngineEntry]:
        try:
            found: Any = json.loads(data) if self._path.suffix == ".json" else tomllib.loads(data.decode())
            rows = found.get("engines") if isinstance(found, dict) else None
            if not isinstance(rows, list):
                raise invalid("engines", "is a list of tables")
            return [entry_of(row) for row in rows]
        except (ValueError, RecursionError, InvalidRequest) as error:
            raise down(f"{self._path}: {error}") from error


def _listing(entries: Sequence[EngineEntry], revision: int) -> RegistryListing:
    """Returns a listing, with a key for each row: two rows may have one engine id, which the directory tells apart."""
    rows: dict[str, tuple[str, bytes, int]] = {}
    for entry in entries:
        key = f"{entry.engine_id}/{entry.addresses[0]}"
        rows[key] = (key, entry.to_json(), revision)
    return RegistryListing(tuple(rows.values()))
