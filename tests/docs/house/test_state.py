"""README: targets or tests that exist show what has run, and its lines for vLLM are those of docs/integrating.md."""

import json
import re

from tests.docs.pages import DOCS, README, ROOT, code, section, tables

UNPUBLISHED = re.compile(r"pip install '?kvgrpc|go get kvgrpc|npm install kvgrpc|^kvgrpc = \"", re.MULTILINE)
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def connector(text: str) -> dict[str, object]:
    """Returns a page's value of `--kv-transfer-config`."""
    found = re.search(r"--kv-transfer-config '(\{.*?\})'", text, re.DOTALL)
    assert found is not None
    made: dict[str, object] = json.loads(found[1])
    return made


def test_what_has_run_is_shown_by_a_target_or_a_test_that_exists() -> None:
    (rows,) = tables(section(README, "## State"))
    for what, state, shown in rows:
        word = re.match(r"\w+", state)
        assert word is not None
        assert word[0] in {"yes", "no"}, what
        assert shown or word[0] == "no", what
        assert set(re.findall(r"`make ([a-z-]+)`", shown)) <= TARGETS, what


def test_the_lines_for_vllm_are_those_of_the_page_about_it() -> None:
    (lines, _) = code(section(README, "## vLLM"), "console")
    assert len(lines.splitlines()) == 6
    assert connector(lines) == connector(section(DOCS / "integrating.md", "## vLLM"))


def test_words_of_the_readme_are_explained_before_they_are_used() -> None:
    text = README.read_text()
    words = text.index("## Words")
    explained = set(re.findall(r"\*([a-z ]+)\*", section(README, "## Words")))
    for word in explained & {"lead", "rank", "grant", "transfer key", "settle"}:
        assert not re.search(rf"\b{word}s?\b", re.sub(r"\|.*", "", text[:words])), word


def test_no_page_installs_what_is_not_published() -> None:
    """No package is published: each is installed from a clone or a file."""
    for page in [README, *DOCS.glob("*.md"), *(ROOT / "clients").glob("*/README.md")]:
        assert UNPUBLISHED.findall(page.read_text()) == []
