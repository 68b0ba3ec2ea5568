"""Layer-by-layer pushes of long contexts between two processes, with all their parts and scattered blocks."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.e2e.conftest import Pair
from tests.service.conftest import Start
from tests.service.engines import SUCCEEDED, Engine
from tests.service.pushes import finish, register, reserve
from tests.service.values import new_key, prompt

LAYERS = 80
BLOCKS = 16_384
TOKENS = prompt(BLOCKS * 16)
LAYER_BYTES = 64
"""Bytes of a block per layer: the minimum, because only the number of blocks matters here."""
POOL = ("--layers", str(LAYERS), "--kv-heads", "1", "--head-dim", "1", "--blocks", str(2 * BLOCKS))


@pytest.fixture
def pair(start: Start) -> Iterator[Pair]:
    source, destination = start(POOL, POOL)
    yield source, destination
    for engine in (destination, source):
        engine.reset()


@pytest.mark.parametrize("first", ["finished", "registered"])
def test_a_long_push_of_scattered_blocks_lands_layer_by_layer_whatever_comes_first(pair: Pair, first: str) -> None:
    source, destination = pair
    blocks, target = (engine.allocate(2 * BLOCKS)[::2] for engine in pair)
    written = fill(source)
    key = new_key()
    reserved = reserve(destination, key, TOKENS, target)
    if first == "registered":
        register(source, reserved.grant)
    for layer in range(LAYERS):
        fields = {"layers": {"first": layer, "count": 1}, "last": layer == LAYERS - 1}
        finish(source, key, TOKENS, blocks, **fields if layer == 0 else {**fields, "content": None})
    if first == "finished":
        register(source, reserved.grant)
    end = destination.wait(reserved.transfer.transfer_id)
    assert end.state == SUCCEEDED, end.failure
    assert source.wait(end.peer.transfer_id).state == SUCCEEDED
    assert (memory(destination)[:, target] == written[:, blocks]).all()


def fill(engine: Engine) -> NDArray[np.uint8]:
    """Fills every block of an engine's pool with bytes of its own. Returns them in shape [layers, blocks, bytes]."""
    made = np.random.default_rng(1).integers(0, 256, (LAYERS, 2 * BLOCKS, LAYER_BYTES), dtype=np.uint8)
    with pool_of(engine) as (fd, start):
        assert os.pwrite(fd, made.tobytes(), start) == made.nbytes
    return made


def memory(engine: Engine) -> NDArray[np.uint8]:
    """Returns the content of an engine's pool, in the shape of `fill`."""
    shape = LAYERS, 2 * BLOCKS, LAYER_BYTES
    with pool_of(engine) as (fd, start):
        return np.frombuffer(os.pread(fd, math.prod(shape), start), dtype=np.uint8).reshape(shape)


@contextmanager
def pool_of(engine: Engine) -> Iterator[tuple[int, int]]:
    """Yields a descriptor of an engine's memory and the address of its own pool, the only one mapped writable."""
    maps = Path(f"/proc/{engine.process.pid}/maps").read_text()
    pool = next(line for line in maps.splitlines() if "memfd:kvgrpc-pool" in line and " rw-s " in line)
    fd = os.open(f"/proc/{engine.process.pid}/mem", os.O_RDWR)
    try:
        yield fd, int(pool.partition("-")[0], 16)
    finally:
        os.close(fd)
