"""The file that says where a server serves, for as long as it does."""

import json
import os
from collections.abc import Mapping
from pathlib import Path


class ReadyFile:
    """The ready file at `path`; an empty path means no file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def write(self, address: str, engine_id: str, more: Mapping[str, str]) -> None:
        """Writes the file, with the addresses in `more` that are not empty. A reader that sees it sees all of it."""
        if not self._path:
            return
        path = Path(self._path)
        partial = path.with_suffix(path.suffix + ".partial")
        said = {"address": address, "engine_id": engine_id, "pid": os.getpid()}
        partial.write_text(json.dumps(said | {name: one for name, one in more.items() if one}) + "\n")
        partial.rename(path)

    def remove(self) -> None:
        """Removes the file. Idempotent."""
        if self._path:
            Path(self._path).unlink(missing_ok=True)
