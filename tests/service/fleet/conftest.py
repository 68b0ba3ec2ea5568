"""Leads with a registry, which is a file that tests rewrite."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.service.engines import Engine


class EnginesFile:
    """A file of entries."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.environment = {"KVGRPC_FLEET_REGISTRY": f"file:{path}", "KVGRPC_FLEET_CHECK_EVERY_S": "0.5"}
        self.write(())

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps({"engines": list(rows)}))
        partial.replace(self._path)

    def spoil(self) -> None:
        """Makes the file unreadable."""
        self._path.write_text("{")


def row(engine: Engine, **changes: Any) -> dict[str, Any]:
    return {"engine_id": engine.engine_id, "addresses": [engine.address], **changes}


@pytest.fixture
def engines_file(tmp_path: Path) -> EnginesFile:
    return EnginesFile(tmp_path / "engines.json")
