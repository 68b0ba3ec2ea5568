"""Processes that stand still for a while, so that a test can act between two steps."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from tests.vllm.engines import LEAD, Engine


@contextmanager
def standing(engine: Engine, named: str = LEAD) -> Iterator[None]:
    """Stops the lead, which then answers nobody, or the worker, so that nothing is computed and no bytes move."""
    (process,) = engine.tree(named)
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)
