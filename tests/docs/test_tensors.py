"""docs/integrating.md on named tensors: its code moves a cache from one engine to another."""

import os
from typing import Any

import pytest
import torch

from tests.docs.pages import DOCS, code, section

PAGE = DOCS / "integrating.md"
(PROGRAM,) = code(section(PAGE, "## Named tensors"), "python")


class Side:
    """An engine with the page's code."""

    def __init__(self) -> None:
        self.code: dict[str, Any] = {"STORE_BYTES": 16 << 20, "REVISION": "rev-1"}
        exec(compile(PROGRAM, PAGE, "exec"), self.code)

    @property
    def store(self) -> Any:
        return self.code["store"]

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()


@pytest.mark.timeout(120)
def test_what_the_page_adds_moves_a_cache_layer_by_layer() -> None:
    torch.manual_seed(1)
    cache = [(torch.randn(1, 4, 40, 16), torch.randn(1, 4, 40, 16).bfloat16()) for _ in range(3)]
    key, digest = os.urandom(16), os.urandom(32)
    with Side() as p, Side() as d:
        p.code["prefill"](key, digest, cache, d.store.address)
        got = [tensor for pair in d.code["decode"](key, digest, len(cache)) for tensor in pair]
        d.code["finished"](key)
        sent = [tensor for pair in cache for tensor in pair]
        assert all(torch.equal(there, here) for there, here in zip(sent, got, strict=True))
        for side in (p, d):
            side.code["finished"](key)
