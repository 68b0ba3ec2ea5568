"""Two peers with identities of their own, each with a window: what is sent to one is in no window of the other."""

import os
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np

from kvgrpc.client import move
from kvgrpc.datapath.host.memory import SharedMemory
from kvgrpc.server import Server
from kvgrpc.v1 import transfer_pb2
from tests.identity.servers import People, serving

TOKENS = list(range(32))


def windows() -> dict[str, bytes]:
    """Returns the content of each window that this process maps, by inode."""
    found: dict[str, bytes] = {}
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:kvgrpc-window" in line:
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            found[line.split()[4]] = os.pread(memory, end - begin, begin)
    os.close(memory)
    return found


def fill(server: Server, seed: int) -> None:
    """Fills the server's pool."""
    memory = server._local[0].memory
    assert isinstance(memory, SharedMemory)
    pool = memory.as_numpy()
    pool[:] = np.random.default_rng(seed).integers(0, 256, len(pool), dtype=np.uint8)


async def test_what_one_peer_was_sent_is_in_no_window_of_another(tmp_path: Path) -> None:
    people = People(tmp_path)
    people.give(p="peer", a="peer", b="peer", router="router engine operator")
    async with AsyncExitStack() as stack:

        async def begin(name: str) -> Server:
            serves = serving(people, name, data_paths=("window",), read_blocks=True)
            return await stack.enter_async_context(serves)

        p, a, b = await begin("p"), await begin("a"), await begin("b")
        fill(p, seed=1)
        at = {s: await stack.enter_async_context(people.client(s, "router")) for s in (p, a, b)}
        sent: list[bytes] = []
        for peer in (a, b):
            taken = await at[p].allocate(2)
            moved = await move(at[p], at[peer], taken, TOKENS)
            assert moved.transfer.state == transfer_pb2.TRANSFER_STATE_SUCCEEDED
            here = [row.data for row in (await at[p].read_blocks(taken)).blocks]
            assert here == [row.data for row in (await at[peer].read_blocks(moved.blocks)).blocks]
            sent.append(here[0])
        of_a, of_b = ([inode for inode, held in windows().items() if data[:64] in held] for data in sent)
        assert (len(of_a), len(of_b)) == (1, 1)
        assert of_a != of_b
