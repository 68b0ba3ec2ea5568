"""Workers of engines whose pool has many small blocks: see `tests/engine/workers.py`.

{"op": "attach", "socket_path", "secret", "memory_bytes"}
{"op": "fill", "seed"}     fills the whole memory
{"op": "read"}             answers the SHA-256 of all even, and of all odd, blocks of 8 bytes
{"op": "detach"}
"""

import hashlib
from typing import Any

import numpy as np

from kvgrpc.engine import Rank, RankTicket
from tests.engine.forked import fork_for_each
from tests.engine.workers import serve_lines


class LargeWorker:
    """A worker with one tensor."""

    def __init__(self) -> None:
        self.memory = np.zeros(0, dtype=np.uint64)
        self.rank: Rank | None = None

    def attach(self, line: dict[str, Any]) -> str:
        self.memory = np.zeros(line["memory_bytes"] // 8, dtype=np.uint64)
        ticket = RankTicket(line["socket_path"], bytes.fromhex(line["secret"]), line["memory_bytes"])
        self.rank = Rank(ticket, 0, [self.memory], data_paths=("cma",))
        return "attached"

    def fill(self, line: dict[str, Any]) -> str:
        self.memory[:] = np.random.default_rng(line["seed"]).integers(1 << 63, size=len(self.memory), dtype=np.uint64)
        return "filled"

    def read(self, _: dict[str, Any]) -> list[str]:
        return [hashlib.sha256(self.memory[first::2].tobytes()).hexdigest() for first in range(2)]

    def detach(self, _: dict[str, Any]) -> str:
        if self.rank is not None:
            self.rank.close()
        self.rank = None
        return "detached"


def serve(fd: int) -> None:
    serve_lines(LargeWorker(), fd)


if __name__ == "__main__":
    fork_for_each(serve)
