"""The file that says where a server serves, as long as it does."""

import json
import os
from pathlib import Path


class ReadyFile:
    """At `path`; empty: nowhere."""

    def __init__(self, path: str) -> None:
        self._path = path

    def write(self, address: str, engine_id: str) -> None:
        """It serves there. A reader that sees the file sees all of it."""
        if not self._path:
            return
        path = Path(self._path)
        partial = path.with_suffix(path.suffix + ".partial")
        partial.write_text(json.dumps({"address": address, "engine_id": engine_id, "pid": os.getpid()}) + "\n")
        partial.rename(path)

    def remove(self) -> None:
        """It serves no longer. Idempotent."""
        if self._path:
            Path(self._path).unlink(missing_ok=True)
