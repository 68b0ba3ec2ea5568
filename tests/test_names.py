"""One name means one thing: two classes of the package do not have the same name."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
SHARED = {"Scheduler": "one concept, for an engine's own process and for a client by RPC: the hooks are the same"}
"""Names of several classes, and why no reader is misled."""


def class_names() -> dict[str, list[str]]:
    """Returns the files that define a class of each name."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "kvgrpc").rglob("*.py")):
        if not path.stem.endswith(("_pb2", "_pb2_grpc")):
            names = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)}
            for name in names:
                found[name].append(path.relative_to(ROOT).as_posix())
    return found


def test_a_class_has_a_name_of_its_own() -> None:
    several = {name: files for name, files in class_names().items() if len(files) > 1}
    assert {name: files for name, files in several.items() if name not in SHARED} == {}
    assert SHARED.keys() <= several.keys(), "a row that is no longer needed"
