"""Fields that are secrets are marked in the schema, and listed in clients that cannot read the marks."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIELD = re.compile(r"^\s*(?:repeated )?bytes (\w+) = \d+( \[debug_redact = true\])?;", re.MULTILINE)
LISTS = {
    "clients/rust/build.rs": r"const SECRETS: \[&str; \d+\] =\s*\[(.*?)\];",
    "clients/cpp/src/redacted.cc": r"kSecrets = \{(.*?)\};",
    "clients/typescript/src/redacted.ts": r"const SECRETS = new Set\(\[(.*?)\]\);",
}
"""Files that list the secrets, and the pattern of each list."""
WORDS = re.compile(r"\b(?:token|key|ticket|proofs?|nonce|secret)\b")
"""Words in names that promise a secret."""


def fields() -> Iterator[tuple[str, bool]]:
    """Yields (name, marked) of every field of type bytes."""
    for path in sorted((ROOT / "proto").rglob("*.proto")):
        for name, mark in FIELD.findall(path.read_text()):
            yield name, bool(mark)


def secrets() -> set[str]:
    return {name for name, marked in fields() if marked}


def test_a_name_is_a_secret_in_every_message_or_in_none() -> None:
    assert secrets() & {name for name, marked in fields() if not marked} == set()


def test_what_is_called_a_secret_is_marked() -> None:
    promised = {name for name, _ in fields() if WORDS.search(name.replace("_", " "))}
    assert promised
    assert promised <= secrets()


def test_only_bytes_are_marked() -> None:
    """No client prints Envoy's messages, whose headers are marked as a whole."""
    files = (path for path in (ROOT / "proto").rglob("*.proto") if path.name != "ext_proc.proto")
    assert sum(path.read_text().count("debug_redact") for path in files) == sum(marked for _, marked in fields())


@pytest.mark.parametrize("path", LISTS)
def test_a_client_that_cannot_read_the_marks_lists_the_names(path: str) -> None:
    found = re.search(LISTS[path], (ROOT / path).read_text(), re.DOTALL)
    assert found is not None
    names = re.findall(r'"(\w+)"', found[1])
    assert {re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower() for name in names} == secrets()
    assert len(names) == len(set(names))
