"""The memory of a lead's own pool, which the storm's routers write into in place of an engine that computes."""

import json
import os
from pathlib import Path

from bench.fleet.storm.prompts import LAYER_BYTES, LAYERS, POOL_BLOCKS


class PoolMemory:
    """The pool of one process. It writes to that process alone, also when another one has its number later."""

    def __init__(self, pid: int) -> None:
        """Raises OSError or StopIteration if the process is no lead with a pool."""
        self._file = os.open(f"/proc/{pid}/mem", os.O_RDWR)
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        # Pools of peers are mapped too, but never writable.
        line = next(line for line in maps if "memfd:kvgrpc-pool" in line and " rw-s " in line)
        self._begin = int(line.partition("-")[0], 16)

    def write(self, block_ids: list[int], blocks: list[bytes]) -> None:
        """Writes blocks. Raises OSError if the process is gone."""
        for block, data in zip(block_ids, blocks, strict=True):
            for layer in range(LAYERS):
                part = data[layer * LAYER_BYTES : (layer + 1) * LAYER_BYTES]
                if os.pwrite(self._file, part, self._begin + (layer * POOL_BLOCKS + block) * LAYER_BYTES) < LAYER_BYTES:
                    raise ProcessLookupError("the process of the pool is gone")

    def close(self) -> None:
        """Closes the memory."""
        os.close(self._file)


def ready_file(folder: Path, address: str) -> Path:
    """Returns the file that says which process serves at an address."""
    return folder / f"{address.replace(':', '-')}.json"


def process_at(folder: Path, address: str) -> int:
    """Returns the process that serves at an address. Raises FileNotFoundError if none does."""
    return int(json.loads(ready_file(folder, address).read_text())["pid"])
