"""Calls that wait for pages of a store, and their places in the line, moment by moment."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import numpy as np
import pytest

from kvgrpc.config import Config, TensorsConfig
from kvgrpc.core.tensors.descriptions import ANY, Get, Release
from kvgrpc.core.tensors.rows import Tensor, TensorStage
from kvgrpc.core.tensors.store_layout import PAGE_BYTES_MAX, PAGES_MAX
from kvgrpc.core.values.owners import ANONYMOUS, ENGINE
from kvgrpc.errors import DeadlineExceeded, Exhausted, InternalError, KVGrpcError, PreconditionFailed, Reason
from kvgrpc.server import Server
from kvgrpc.service.tensors.life import Life
from kvgrpc.service.tensors.pages import SpillMemory, StorePages
from kvgrpc.service.tensors.staging_store import StagingStore
from tests.service.tensors.leads import (
    KEY,
    PAGE,
    PAGES,
    SPILL_PAGES,
    arriving,
    fill,
    life_of,
    named,
    spilled,
    stored,
)

MANY = 500


def got(staging: StagingStore, name: str = "a", timeout_s: float = 20.0) -> "asyncio.Future[Any]":
    """Starts a call that gets a tensor."""
    return asyncio.ensure_future(staging.get(Get(named(name), ANY, timeout_s=timeout_s), ""))


def put(life: Life, pages: StorePages, name: str = "new", count: int = 1) -> "asyncio.Future[Any]":
    """Starts a put that wants pages."""
    return asyncio.ensure_future(pages.take([arriving(life, name, count)], "", life.time() + 20.0))


async def refusal(call: Awaitable[object]) -> KVGrpcError:
    with pytest.raises(KVGrpcError) as raised:
        await asyncio.wait_for(call, 10.0)
    return raised.value


async def settled() -> None:
    """Runs the loop until everything that can be done at once is done."""
    for _ in range(10):
        await asyncio.sleep(0)


def timers() -> int:
    """Returns the number of the loop's timers that were not cancelled."""
    loop: Any = asyncio.get_running_loop()
    return sum(not handle.cancelled() for handle in loop._scheduled)


async def test_a_tensor_that_is_dropped_before_its_first_step_takes_no_place(staging: StagingStore) -> None:
    life = life_of(staging)
    spilled(life)
    fill(life)
    call = got(staging)
    asyncio.get_running_loop().call_soon(staging.release, Release(KEY))
    assert (await refusal(call)).reason is Reason.TRANSFER_ENDED
    await settled()
    assert len(staging.store.pages.line) == 0


@pytest.mark.parametrize("end", ["deadline", "leaves"])
async def test_what_nobody_waits_for_any_more_has_no_place_before_others(staging: StagingStore, end: str) -> None:
    life, pages = life_of(staging), staging.store.pages
    spilled(life)
    allocation = fill(life)
    call = got(staging, timeout_s=0.1 if end == "deadline" else 20.0)
    await settled()
    assert len(pages.line) == 1
    if end == "deadline":
        assert isinstance(await refusal(call), DeadlineExceeded)
    else:
        call.cancel()
    await settled()
    assert len(pages.line) == 0
    assert life.table.tensors[named()].stage is TensorStage.SPILLED
    life.transfers.free(allocation)
    await put(life, pages)


async def test_who_waits_longer_has_the_tensor_when_there_is_room(staging: StagingStore) -> None:
    life = life_of(staging)
    spilled(life)
    allocation = fill(life)
    short, long = got(staging, timeout_s=0.1), got(staging)
    assert isinstance(await refusal(short), DeadlineExceeded)
    assert not long.done()
    life.transfers.free(allocation)
    (tensor,) = (await asyncio.wait_for(long, 10.0)).tensors
    assert tensor is life.table.tensors[named()]


async def test_a_place_that_is_kept_for_one_that_is_to_come_again_costs_one_timer(staging: StagingStore) -> None:
    life, pages = life_of(staging), staging.store.pages
    pages.line.refuse(pages.line.join(named("absent"), 1, urgent=False), life.time())
    before = timers()
    for _ in range(MANY):
        pages.look()
    assert timers() <= before + 1
    new = arriving(life)
    for again in (True, True, False):
        try:
            await pages.take([new], "", life.time() + 20.0)
            break
        except Exhausted:
            assert again, "the place was kept for too long"
    assert len(pages.line) == 0


def failing(life: Life, store: Any) -> StorePages:
    """Returns pages whose copies fail: the store is shorter than it says, or is read-only."""
    return StorePages(life, SpillMemory(SPILL_PAGES, PAGE, lambda: store))


async def test_a_copy_out_that_fails_leaves_the_tensor_in_the_store_and_is_not_tried_again(
    staging: StagingStore,
) -> None:
    life = life_of(staging)
    pages = failing(life, np.zeros(0, np.uint8))
    tensor = stored(life)
    fill(life)
    for name in ("one", "two"):
        assert isinstance(await refusal(put(life, pages, name)), Exhausted)
    assert (tensor.stage, tensor.copying, life.table.spill_pages.used) == (TensorStage.STORED, False, 0)
    assert (await got(staging)).tensors == (tensor,)


async def test_a_copy_back_that_fails_is_told_and_gives_the_pages_back(staging: StagingStore) -> None:
    life = life_of(staging)
    memory = np.zeros(PAGES * PAGE, np.uint8)
    memory.flags.writeable = False
    pages = failing(life, memory)
    tensor, free = spilled(life), life.transfers.free_pages()
    staging.store.pages = pages
    error = await refusal(got(staging))
    assert isinstance(error, InternalError)
    assert (tensor.stage, tensor.copying, life.transfers.free_pages()) == (TensorStage.SPILLED, False, free)


async def test_one_that_stays_in_the_store_while_it_is_copied_out_leaves_the_turn_to_the_next(
    staging: StagingStore,
) -> None:
    life, pages = life_of(staging), staging.store.pages
    idle = [stored(life, name) for name in ("wanted", "other", "next")]
    fill(life)
    new = put(life, pages)
    await asyncio.sleep(0)
    assert stages(idle) == [TensorStage.SPILLING, TensorStage.SPILLING, TensorStage.STORED]
    call = got(staging, "wanted")
    await asyncio.wait_for(new, 10.0)
    assert (await call).tensors == (idle[0],)
    assert stages(idle) == [TensorStage.HELD, TensorStage.SPILLED, TensorStage.SPILLED]


def stages(tensors: list[Tensor]) -> list[TensorStage]:
    return [tensor.stage for tensor in tensors]


async def test_one_that_is_released_before_its_caller_has_it_is_not_given(staging: StagingStore) -> None:
    life = life_of(staging)
    tensor = arriving(life)
    call = got(staging)
    await settled()
    tensor.allocation_id, _ = life.transfers.allocate(1, "")
    life.table.stored(tensor, life.time())
    life.perform()
    assert staging.release(Release(KEY)) == 1
    error = await refusal(call)
    assert isinstance(error, PreconditionFailed)
    assert error.reason is Reason.TRANSFER_ENDED


async def test_a_spill_that_does_not_fit_the_machine_is_refused_when_the_server_starts() -> None:
    tensors = TensorsConfig(spill_bytes=PAGES_MAX * PAGE_BYTES_MAX)
    server = Server(Config(listen="127.0.0.1:0", data_paths=("shm",), pool=None, tensors=tensors))
    with pytest.raises(Exhausted, match="spill_bytes"):
        await server.start()


@pytest.mark.parametrize(("caller", "stage"), [(ANONYMOUS, TensorStage.STORED), (ENGINE, TensorStage.HELD)])
async def test_a_tensor_that_comes_as_its_caller_leaves_is_held_by_the_engine_alone(
    staging: StagingStore, caller: str, stage: TensorStage
) -> None:
    call = asyncio.ensure_future(staging.get(Get(named(), ANY, timeout_s=20.0), "", caller))
    await asyncio.sleep(0)
    tensor = stored(life_of(staging))
    staging._perform()
    assert tensor.stage is TensorStage.HELD
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert tensor.stage is stage


async def test_a_tensor_that_one_caller_did_not_take_is_held_by_the_other_that_did(staging: StagingStore) -> None:
    calls = [asyncio.ensure_future(staging.get(Get(named(), ANY, timeout_s=20.0), "")) for _ in range(2)]
    await asyncio.sleep(0)
    tensor = stored(life_of(staging))
    staging._perform()
    calls[0].cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert calls[1].result().tensors == (tensor,)
    assert tensor.stage is TensorStage.HELD
