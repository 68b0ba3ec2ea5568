"""A rank of the lead's own: its knowledge of the memory that it shares with a worker, and when it learns of reads."""

import asyncio

import pytest

from kvgrpc.core.actions import Expect
from kvgrpc.datapath.host.memory import SharedMemory
from kvgrpc.local_ranks import SharedRank
from tests.datapath.movers import Held, HeldWritten, until


def test_shared_memory_that_a_peer_may_still_write_is_kept_when_its_rank_closes() -> None:
    path = HeldWritten()
    path.late_writes = "a write may land after its end"
    memory = SharedMemory.create(4096)
    rank = SharedRank(0, memory, [path], lambda _: None)
    rank.perform(Expect("w", open=True, writes=True))
    assert not rank.close(0.1)
    assert len(memory.as_numpy()) == 4096


async def test_a_read_gets_turns_from_when_the_loop_runs_again() -> None:
    held = Held()
    rank = SharedRank(0, SharedMemory.create(4096), [held], lambda _: None)
    rank.perform(Expect("r", open=True))
    await asyncio.sleep(0)
    await asyncio.to_thread(until, lambda: held.turns > 0)
    rank.perform(Expect("r", open=False))
    assert await asyncio.to_thread(rank.close, 1.0)


async def test_a_read_that_ends_with_its_rank_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    rank = SharedRank(0, SharedMemory.create(4096), [Held()], lambda _: None)
    rank.perform(Expect("r", open=True))
    assert await asyncio.to_thread(rank.close, 1.0)
    rank.perform(Expect("r", open=False))
    await asyncio.sleep(0)
    assert not caplog.records
