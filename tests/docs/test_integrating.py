"""docs/integrating.md: the code that an engine adds is as short as the page says, and works."""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvgrpc.testing import PROMISES
from kvgrpc.testing.adapter import FullAdapter
from tests.docs.pages import DOCS, ROOT, code, plain, section, tables
from tests.examples.code_lines import code_lines
from tests.testing.minimal import MinimalAdapter

PAGE = DOCS / "integrating.md"
SHAPE = {"LAYERS": 2, "BLOCK_TOKENS": 16, "BLOCKS": 32, "KV_HEADS": 1, "HEAD_DIM": 8}
BLOCK_BYTES = 2 * 16 * 8 * 2
PROMPT = list(range(40))
WAIT_S = 60.0
OTHER_PROGRAMS = 11


def program() -> str:
    """Returns the code that an engine adds. The page's other programs are about layouts (`test_layouts`), a device, the
    conformance kit, and tensors.
    """
    added, *others = code(PAGE.read_text(), "python")
    assert len(others) == OTHER_PROGRAMS
    return added


class OwnEngine:
    """An engine with its own tensors and block manager, and the page's code."""

    def __init__(self, name: str) -> None:
        self.freed: list[int] = []
        self.layers = [torch.zeros(SHAPE["BLOCKS"], BLOCK_BYTES, dtype=torch.uint8) for _ in range(SHAPE["LAYERS"])]
        self.code: dict[str, Any] = {
            **SHAPE, "BLOCK_BYTES": BLOCK_BYTES, "ENGINE_ID": name, "layer_tensors": self.layers, "current_step": 0,
            "block_manager": SimpleNamespace(free=self.freed.extend),
        }  # fmt: skip
        exec(compile(program(), PAGE, "exec"), self.code)

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not done():
            assert time.monotonic() < deadline
            self.code["step"]()
            time.sleep(0.001)

    def close(self) -> None:
        self.code["engine"].close()
        self.code["rank"].close()


@pytest.fixture
def engines() -> Iterator[tuple[OwnEngine, OwnEngine]]:
    with ExitStack() as stack:
        p, d = OwnEngine("prefill-0"), OwnEngine("decode-0")
        stack.callback(p.close)
        stack.callback(d.close)
        yield p, d


def request(blocks: list[int]) -> Any:
    return SimpleNamespace(ids=PROMPT, blocks=blocks, key=os.urandom(16), computed_tokens=0, failed="")


def test_what_an_engine_adds_has_as_many_lines_of_code_as_the_page_says() -> None:
    said = re.search(r"in (\d+) lines of code", PAGE.read_text())
    assert said is not None
    assert len(code_lines(program())) == int(said[1]) <= 50


def test_the_checklist_has_every_promise_of_the_conformance_kit() -> None:
    rows, methods = tables(section(PAGE, "## What an engine promises"))
    assert tuple(plain(row[0]) for row in rows) == PROMISES
    optional = set(re.findall(r"`(\w+)`", " ".join(row[0] for row in methods)))
    assert optional == {name for name in vars(FullAdapter) if not name.startswith("_")}
    assert set(re.findall(r"`(\w+)`", " ".join(row[2] for row in methods))) <= set(PROMISES)


def test_the_page_runs_the_conformance_kit() -> None:
    (program,) = code(section(PAGE, "## What an engine promises"), "python")
    found: dict[str, Any] = {"MyAdapter": MinimalAdapter}
    exec(compile(program, PAGE, "exec"), found)
    found["test_the_engine_keeps_its_promises"]("returned_blocks_are_freed")


def test_named_tensors_take_as_many_lines_as_the_page_says() -> None:
    (program,) = code(section(PAGE, "## Named tensors"), "python")
    assert len(code_lines(program)) == 19
    assert "These 19 lines of code" in PAGE.read_text()


def test_every_file_of_the_whole_engine_has_a_step() -> None:
    _, _, rest = PAGE.read_text().partition("## A whole engine\n")
    named = set(re.findall(r"`(examples/minimal_engine/\w+\.py)`", rest.partition("\n## ")[0]))
    files = {str(file.relative_to(ROOT)) for file in (ROOT / "examples/minimal_engine").glob("*.py")}
    assert named == files - {"examples/minimal_engine/__init__.py"}


def test_the_code_of_the_page_moves_a_prompt_and_gives_its_blocks_back(engines: tuple[OwnEngine, OwnEngine]) -> None:
    p, d = engines
    source, target = request([1, 2, 9]), request([30, 3, 4])
    for number, layer in enumerate(p.layers):
        layer[source.blocks] = 7 + number
    p.code["current_step"] = d.code["current_step"] = 1
    params = p.code["prefilled"](source)
    d.code["arrived"](target, params)
    d.code["scheduled"](target, target.blocks, 0)
    for engine in engines:
        engine.code["step"]()
        engine.code["after_step"](1)
    d.until(lambda: target.computed_tokens == len(PROMPT))
    assert all(torch.all(layer[target.blocks] == 7 + number) for number, layer in enumerate(d.layers))
    p.until(lambda: p.freed == source.blocks)


def test_the_code_of_the_page_hears_of_what_fails(engines: tuple[OwnEngine, OwnEngine]) -> None:
    p, d = engines
    source, target = request([1, 2, 9]), request([30, 3, 4])
    target.ids = [token + 1 for token in PROMPT]
    d.code["arrived"](target, p.code["prefilled"](source))
    p.code["step"]()
    d.until(lambda: bool(target.failed))
    assert target.failed.startswith("CONTENT_MISMATCH")
    assert not target.computed_tokens
