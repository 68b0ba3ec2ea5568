"""Results of `Rank.close` for a worker's own memory, with data paths that end as a test decides."""

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvgrpc.datapath import mover
from kvgrpc.engine import Engine, Rank, rank as rank_module
from kvgrpc.errors import InternalError, Reason
from tests.datapath.movers import Held
from tests.engine.conftest import Leads
from tests.engine.made import layout
from tests.engine.support import refused


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Replaces all data paths of ranks with one that the test controls."""
    path = Held()
    monkeypatch.setattr(rank_module, "make_paths", lambda *_: ([path], []))
    return path


@pytest.fixture
def rank(leads: Leads, held: Held) -> Iterator[Rank]:
    """Yields a worker with memory of its own."""
    with Engine.attach(leads[0].socket_path, pool=layout(), private_memory=True) as engine:
        yield Rank(engine.ticket, 0, [np.zeros(engine.pool.total_bytes, dtype=np.uint8)])


def test_memory_is_at_rest_when_close_returns(rank: Rank, held: Held) -> None:
    rank.close()
    assert held.closed
    rank.close()


def test_close_raises_as_often_as_it_is_called_when_a_data_path_did_not_close(rank: Rank, held: Held) -> None:
    held.break_at = "close"
    for _ in range(2):
        with refused(Reason.DATA_PATH_FAILED, InternalError):
            rank.close()


def test_close_raises_when_a_data_path_does_not_return(rank: Rank, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "_STUCK_S", 0.05)
    monkeypatch.setattr(rank_module, "CLOSE_S", 0.0)
    release = threading.Event()
    wait: Callable[[], object] = release.wait
    held.close = wait  # type: ignore[method-assign,assignment]
    with refused(Reason.DATA_PATH_FAILED, InternalError):
        rank.close()
    release.set()
