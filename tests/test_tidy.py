"""Style as a test: what a reader may rely on in every hand-written file of the package, and in every test.

A rule that one place has good reason to break gets a row in EXCEPTIONS, with that reason. A row
that is no longer needed fails too, so that the list only says what is true.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
TEST_FILES_MAX = 16
"""In one folder: of more it should have rooms."""

# (path or path:function, rule) -> why.
EXCEPTIONS: dict[tuple[str, str], str] = {
    (
        "kvgrpc/integrations/vllm/places.py",
        "time.sleep",
    ): "two processes meet once, at the start, by files in a folder",
    ("kvgrpc/cli/get.py", "time.sleep"): "--watch looks again and again, and no server tells of all kinds of changes",
    (
        "kvgrpc/cli/serve.py:serve",
        "function-lines",
    ): "its arguments are the options of the command, some of three lines each; the body has twenty",
}

# Where `print` is what the file is for, once the file is there.
PRINTERS = {
    "kvgrpc/cli": "what a command says goes to its standard output",
    "bench": "a benchmark prints its table",
}

# Called as, and what to do instead.
BANNED_CALLS = {
    "time.sleep": "wait for the event, with a deadline; a sleep is too long or too short",
    "print": "raise, return, or log; standard output belongs to the command line",
}


@dataclass(frozen=True)
class Finding:
    """One place that breaks one rule."""

    where: str  # path, or path:function, as in EXCEPTIONS
    rule: str
    line: int
    text: str


def hand_written() -> list[Path]:
    paths = sorted(path for package in ("bench", "kvgrpc", "sim") for path in (ROOT / package).rglob("*.py"))
    return [path for path in paths if not path.stem.endswith(("_pb2", "_pb2_grpc"))]


def inspect(name: str, source: str) -> Iterator[Finding]:
    """All rules over one file."""
    tree = ast.parse(source)
    yield from long_file(name, source)
    if not ast.get_docstring(tree):
        yield Finding(name, "docstring", 1, "say in a docstring what this file is and its rules")
    yield from long_functions(name, tree)
    yield from banned_calls(name, tree)
    yield from unfinished(name, source)


def inspect_test(name: str, source: str) -> Iterator[Finding]:
    """The rules over one file of the tests."""
    yield from long_file(name, source)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom | ast.Import):
            continue
        package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for module in [f"{package}{alias.name}" for alias in node.names]:
            if module.startswith("tests.") and ".test_" in module:
                text = f"{module}: what two files share belongs to a module that is no test, or to a conftest"
                yield Finding(name, "imports-test", node.lineno, text)


def crowded(folders: dict[str, int]) -> Iterator[Finding]:
    """Folders with too many files of tests, by how many each has."""
    for name, count in folders.items():
        if count > TEST_FILES_MAX:
            text = f"{count} files of tests, at most {TEST_FILES_MAX}: give the folder rooms"
            yield Finding(name, "test-files", 1, text)


def long_file(name: str, source: str) -> Iterator[Finding]:
    lines = len(source.splitlines())
    if lines > FILE_LINES_MAX:
        text = f"{lines} lines, at most {FILE_LINES_MAX}: split it by what changes together"
        yield Finding(name, "file-lines", 1, text)


def long_functions(name: str, tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > FUNCTION_LINES_MAX:
            text = f"{lines} lines, at most {FUNCTION_LINES_MAX}: take a step out and name it"
            yield Finding(f"{name}:{node.name}", "function-lines", node.lineno, text)


def banned_calls(name: str, tree: ast.Module) -> Iterator[Finding]:
    full_names = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        written = ast.unparse(node.func)
        called = full_names.get(written, written)
        if called == "print" and any(name.startswith(printer) for printer in PRINTERS):
            continue
        if called in BANNED_CALLS:
            yield Finding(name, called, node.lineno, f"{called}(): {BANNED_CALLS[called]}")


def unfinished(name: str, source: str) -> Iterator[Finding]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            for word in re.findall(r"\b(?:TODO|FIXME|XXX)\b", token.string):
                yield Finding(name, "unfinished", token.start[0], f"{word}: do it now")


def findings() -> list[Finding]:
    return [finding for path in hand_written() for finding in inspect(where(path), path.read_text())]


def findings_in_tests() -> list[Finding]:
    files = sorted((ROOT / "tests").rglob("*.py"))
    folders = Counter(where(path.parent) for path in files if path.stem.startswith("test_"))
    return [
        *(finding for path in files for finding in inspect_test(where(path), path.read_text())),
        *crowded(folders),
    ]


def where(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def listing(found: list[Finding]) -> str:
    return "\n".join(f"{f.where.partition(':')[0]}:{f.line}: {f.text}" for f in found)


def test_the_package_is_tidy() -> None:
    found = [f for f in findings() if (f.where, f.rule) not in EXCEPTIONS]
    assert not found, f"\n{listing(found)}\n(a good reason? add a row to EXCEPTIONS in tests/test_tidy.py)"


def test_the_tests_are_tidy() -> None:
    found = findings_in_tests()
    assert not found, f"\n{listing(found)}"


def test_every_exception_is_still_needed() -> None:
    needed = {(f.where, f.rule) for f in findings()}
    assert [row for row in EXCEPTIONS if row not in needed] == []
    assert [row for row, reason in EXCEPTIONS.items() if not reason] == []


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        ("file-lines", '"""Doc."""\n' + "x = 1\n" * FILE_LINES_MAX),
        ("docstring", "x = 1\n"),
        ("function-lines", '"""Doc."""\ndef f():\n' + "    x = 1\n" * FUNCTION_LINES_MAX),
        ("time.sleep", '"""Doc."""\nimport time\ntime.sleep(1)\n'),
        ("time.sleep", '"""Doc."""\nfrom time import sleep as nap\nnap(1)\n'),
        ("print", '"""Doc."""\nprint(1)\n'),
        ("unfinished", '"""Doc."""\n# ' + "TODO: more\n"),
    ],
)
def test_each_rule_finds_what_it_is_for(rule: str, source: str) -> None:
    assert [finding.rule for finding in inspect("sample.py", source)] == [rule]


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        ("file-lines", "x = 1\n" * (FILE_LINES_MAX + 1)),
        ("imports-test", "from tests.core.test_pull import Pull\n"),
        ("imports-test", "from tests.core import test_pull\n"),
        ("imports-test", "def f():\n    import tests.core.test_pull\n"),
    ],
)
def test_each_rule_of_tests_finds_what_it_is_for(rule: str, source: str) -> None:
    assert [finding.rule for finding in inspect_test("test_sample.py", source)] == [rule]


def test_a_folder_with_too_many_files_of_tests_is_found() -> None:
    found = crowded({"tests/core": TEST_FILES_MAX, "tests/wire": TEST_FILES_MAX + 1})
    assert [(finding.where, finding.rule) for finding in found] == [("tests/wire", "test-files")]


def test_each_rule_accepts_what_is_at_the_limit() -> None:
    body = "    x = 1\n" * (FUNCTION_LINES_MAX - 1)
    source = '"""Doc."""\ndef f():\n' + body
    source += "x = 1\n" * (FILE_LINES_MAX - source.count("\n"))
    assert list(inspect("sample.py", source)) == []
