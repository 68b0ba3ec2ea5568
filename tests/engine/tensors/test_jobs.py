"""The thread of a store: a job that fails or waits affects no other job."""

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvgrpc.engine.tensors.arrays import described_as
from kvgrpc.engine.tensors.jobs import Job
from kvgrpc.engine.tensors.puts import RETRY_S
from kvgrpc.errors import Exhausted, InvalidRequest, PreconditionFailed
from tests.engine.tensors.conftest import PAGE, PAGES, Launch


def nonsense() -> Job:
    yield {"no_such_call": 1}


def test_a_call_that_cannot_be_said_ends_its_own_job_alone(launch: Launch, key: bytes) -> None:
    p = launch()
    waiting = p.get_async(key, "a")
    with pytest.raises(ValueError, match="no_such_call"):
        p._thread.run(nonsense()).result(20.0)
    with pytest.raises(InvalidRequest, match="traceparent"):
        p.put(key, "b", np.zeros(3), traceparent="\ud800")
    with pytest.raises(InvalidRequest, match="traceparent"):
        p.get(key, "b", traceparent="\ud800")
    assert not waiting.done()
    p.release(key)
    with pytest.raises(PreconditionFailed, match="TRANSFER_ENDED"):
        waiting.result(20.0)


def test_a_full_store_is_asked_again_at_its_pace_however_many_wait(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = launch()
    p.empty((PAGES * PAGE,), "uint8")
    asked: list[str] = []
    call: Callable[..., int] = p._engine.call

    def counted(**wanted: Any) -> int:
        asked.extend(wanted)
        return call(**wanted)

    monkeypatch.setattr(p._engine, "call", counted)
    began, waiters = time.monotonic(), 3
    waiting = [p._thread.run(p._puts.new(described_as((1,), "uint8"), began + 0.5)) for _ in range(waiters)]
    for one in waiting:
        with pytest.raises(Exhausted):
            one.result(20.0)
    tries = (time.monotonic() - began) / RETRY_S + 2
    assert asked.count("allocate_blocks") <= waiters * (tries + waiters), "each end of one wakes the others once"


def test_a_tensor_that_is_saved_is_not_kept_until_its_consumer_has_it(launch: Launch, key: bytes) -> None:
    p, d = launch(), launch()
    d.close()
    tensor = torch.ones(PAGE)
    pending = p.put_async(key, "a", tensor, to=[d.address], timeout_s=60.0)
    p.wait_for_saved(20.0)
    kept = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert kept() is None
    assert not pending.done()
