"""A lead with a staging store in the test's own process, for states that last only a moment."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvgrpc.config import Config, TensorsConfig
from kvgrpc.core.tensors.descriptions import Description, NamedTensor, TensorId
from kvgrpc.core.tensors.rows import Tensor
from kvgrpc.server import Server
from kvgrpc.service.tensors.life import Life
from kvgrpc.service.tensors.staging_store import StagingStore

KEY = b"k" * 16
PAGE = 4096
PAGES = 8
SPILL_PAGES = 4


@asynccontextmanager
async def served(spill_pages: int = SPILL_PAGES, pages: int = PAGES, **options: Any) -> AsyncIterator[Server]:
    tensors = TensorsConfig(store_bytes=pages * PAGE, page_bytes=PAGE, spill_bytes=spill_pages * PAGE)
    server = Server(Config(listen="127.0.0.1:0", data_paths=("shm",), tensors=tensors, **options))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def named(name: str = "a") -> TensorId:
    return TensorId(KEY, name)


def of_pages(pages: int = 1) -> Description:
    return Description("uint8", (pages * PAGE,), pages * PAGE)


def life_of(staging: StagingStore) -> Life:
    return staging.store.life


def arriving(life: Life, name: str = "a", pages: int = 1) -> Tensor:
    """Returns a tensor that is to come, and has no pages yet."""
    (tensor,) = life.table.arrive([NamedTensor(named(name), of_pages(pages))], "peer:1", 100.0, life.time())
    return tensor


def stored(life: Life, name: str = "a", pages: int = 1) -> Tensor:
    """Returns a tensor that has come."""
    tensor = arriving(life, name, pages)
    tensor.allocation_id, _ = life.transfers.allocate(pages, "")
    life.table.stored(tensor, life.time())
    return tensor


def spilled(life: Life, name: str = "a") -> Tensor:
    """Returns a tensor of one page that was spilled out of the store."""
    stored(life, name)
    (tensor,) = life.table.spill(1, life.time())
    life.transfers.free(life.table.spilled(tensor, life.time()))
    return tensor


def fill(life: Life) -> str:
    """Takes all pages that are left. Returns the allocation."""
    return life.transfers.allocate(life.transfers.free_pages(), "")[0]
