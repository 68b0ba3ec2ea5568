"""No file reads a private name of another one: what others need is public, and a node's tables are in its state."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [
    path
    for package in ("bench", "kvgrpc", "sim")
    for path in sorted((ROOT / package).rglob("*.py"))
    if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
]
EXCEPTIONS = {
    "bench/roles/serving.py": "a measurement looks into the server that it runs itself",
    "kvgrpc/datapath/collective/gloo.py": "options of the library, which has no public name for them",
    "kvgrpc/datapath/collective/nccl.py": "groups of calls, for which the library has no public name",
    "kvgrpc/datapath/nixl/agent.py": "a handle of the library, which has no public name for it",
    "kvgrpc/integrations/vllm/prompts.py": "vLLM's request has no public way to become shorter",
    "kvgrpc/integrations/vllm/waking.py": "vLLM's engine has no public call before it sleeps",
}
"""Files, and why they read one."""
DOCUMENTED = {"_replace", "_exit"}
"""Of named tuples and `os`: public in spite of their names."""


def foreign(source: str) -> list[str]:
    """Private attributes that a file reads and does not define."""
    tree = ast.parse(source)
    own: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                own.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                own.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                own.add(name)
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in own | DOCUMENTED
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_reads_no_private_name_of_another(path: Path) -> None:
    found = foreign(path.read_text())
    assert bool(found) is (str(path.relative_to(ROOT)) in EXCEPTIONS), found


def test_a_private_name_of_another_file_is_found() -> None:
    assert foreign("def f(other):\n    return other._secret") == ["line 2: other._secret"]
    assert foreign("class A:\n    _own = 1\n    def f(self, b: 'A'):\n        return self._own + b._own") == []
