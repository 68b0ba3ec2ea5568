"""Processes that stand still for a while, so that a test comes by between two steps."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from tests.vllm.engines import LEAD, Engine


@contextmanager
def standing(engine: Engine, named: str = LEAD) -> Iterator[None]:
    """Its lead stands still: it answers nobody. Or its worker: nothing is computed, and no bytes move."""
    (process,) = engine.tree(named)
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)
