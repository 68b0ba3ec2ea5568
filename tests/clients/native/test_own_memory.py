"""Ranks in C that bring their memory move its bytes: they read peers of both languages, which read them."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from kvgrpc.engine import BlocksReturned, Engine, Rank, Received, content
from tests.clients.native.library import library
from tests.clients.native.transfers import end_of
from tests.clients.native.worker import Worker
from tests.engine.made import LAYER_BYTES, LAYERS, layout, made_bytes
from tests.engine.support import Lead, new_key, tokens

pytestmark = pytest.mark.timeout(900)
PROMPT = tokens(32)


class Memory(Protocol):
    def fill(self, blocks: Sequence[int], seed: int) -> NDArray[np.uint8]: ...

    def read(self, blocks: Sequence[int]) -> NDArray[np.uint8]: ...


class SharedRank:
    """A rank in Python whose pool its lead made, and reads."""

    def __init__(self, rank: Rank) -> None:
        self._view = rank.memory.reshape(LAYERS, -1, LAYER_BYTES)

    def fill(self, blocks: Sequence[int], seed: int) -> NDArray[np.uint8]:
        made = made_bytes(blocks, seed)
        self._view[:, list(blocks)] = made
        return made

    def read(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        return self._view[:, list(blocks)].copy()


@pytest.fixture(scope="module", params=["shm,cma", "cma"])
def leads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lead, Lead]]:
    library()
    folder = tmp_path_factory.mktemp("leads")
    with ExitStack() as stack:
        p, d = (Lead(folder, name, "--data-paths", request.param) for name in ("P", "D"))
        for lead in (p, d):
            stack.callback(lead.close)
        yield p.wait_ready(), d.wait_ready()


def attached(stack: ExitStack, lead: Lead, kind: str) -> tuple[Engine, Memory]:
    """Attaches an engine with one rank: shared memory in Python, or private memory of a worker in C or Python."""
    lead.wait_no_engine()
    if kind == "shared":
        engine = stack.enter_context(Engine.attach(lead.socket_path, pool=layout()))
        return engine, SharedRank(stack.enter_context(Rank(engine.ticket)))
    engine = stack.enter_context(Engine.attach(lead.socket_path, pool=layout(), private_memory=True))
    worker = Worker(kind, engine.ticket)
    stack.callback(worker.close)
    return engine, worker


def pulled(p: Engine, d: Engine, blocks: list[int], into: list[int]) -> None:
    """Moves blocks of one engine into those of another one."""
    handover = p.finished_blocks(blocks, content(PROMPT), transfer_key=new_key())
    p.flush()
    pull = d.pull(handover.grant, content(PROMPT))
    pull.start(into)
    end = end_of(d, pull)
    assert isinstance(end, Received), end


@pytest.mark.parametrize(
    ("source", "destination"), [("C", "shared"), ("shared", "C"), ("C", "Python"), ("Python", "C"), ("C", "C")]
)
def test_bytes_of_own_memory_move(leads: tuple[Lead, Lead], source: str, destination: str) -> None:
    with ExitStack() as stack:
        p, here = attached(stack, leads[0], source)
        d, there = attached(stack, leads[1], destination)
        for seed in (1, 2):
            made = here.fill([1, 2], seed)
            pulled(p, d, [1, 2], [6, 3])
            assert np.array_equal(there.read([6, 3]), made)
        assert not there.read([5]).any()
    leads[1].wait_no_engine()


def test_own_memory_comes_back_to_the_next_lead(tmp_path: Path) -> None:
    library()
    with ExitStack() as stack:
        other = Lead(tmp_path, "D")
        stack.callback(other.close)
        d, there = attached(stack, other.wait_ready(), "shared")
        p = stack.enter_context(Engine.launch(pool=layout(), private_memory=True, flags=("--drain-s", "0")))
        here = Worker("C", p.ticket)
        stack.callback(here.close)
        made = here.fill([1, 2], 3)
        pulled(p, d, [1, 2], [6, 3])
        before, lost = p.incarnation, p.finished_blocks([3], content(PROMPT[:16]), transfer_key=new_key())
        os.kill(p.lead_pid, signal.SIGKILL)
        assert isinstance(end_of(p, lost), BlocksReturned)
        assert p.incarnation != before
        pulled(p, d, [1, 2], [8, 9])
        assert np.array_equal(there.read([8, 9]), made)
