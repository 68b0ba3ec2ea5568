"""Tensor stores of engines. Each store has a lead process of its own."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvgrpc.engine.tensors import TensorStore

PAGE = 4096
PAGES = 64
Launch = Callable[..., TensorStore]
Pair = tuple[TensorStore, TensorStore]


@pytest.fixture
def key() -> bytes:
    """Returns the transfer key of a request that no other test knows."""
    return os.urandom(16)


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Launches stores of 64 pages, and closes them at the end of the test."""
    with ExitStack() as stack:

        def begin(*flags: str, **options: Any) -> TensorStore:
            sizes = {"store_bytes": PAGES * PAGE, "page_bytes": PAGE} | options
            return stack.enter_context(TensorStore.launch(flags=["--drain-s", "0", *flags], **sizes))

        yield begin


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[TensorStore, TensorStore]]:
    """Yields a source and a consumer that the tests of a file share."""
    with ExitStack() as stack:
        made = [
            stack.enter_context(TensorStore.launch(store_bytes=PAGES * PAGE, page_bytes=PAGE, flags=["--drain-s", "0"]))
            for _ in range(2)
        ]
        yield made[0], made[1]
