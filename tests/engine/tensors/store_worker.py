"""Stores in memory of processes of their own, driven by JSON lines like the workers of tests/engine/workers.py."""

from typing import Any

import torch

from kvgrpc.engine.tensors import TensorStore
from tests.engine.forked import fork_for_each
from tests.engine.tensors.conftest import PAGE, PAGES
from tests.engine.workers import serve_lines


class Worker:
    """A worker with one store."""

    def __init__(self) -> None:
        self.store: TensorStore | None = None

    def launch(self, line: dict[str, Any]) -> str:
        """Launches the store and returns its address."""
        memory = torch.zeros(PAGES * PAGE, dtype=torch.uint8)
        self.store = TensorStore.launch(
            memory=memory, page_bytes=PAGE, data_paths=(line["data_path"],), flags=["--drain-s", "0"]
        )
        return self.store.address

    def put(self, line: dict[str, Any]) -> str:
        """Puts `parts` tensors, each named by its number and with different elements."""
        assert self.store is not None
        key, to = bytes.fromhex(line["key"]), line["to"]
        putting = [self.store.put_async(key, part, torch.arange(900) + part, to=to) for part in range(line["parts"])]
        for pending in putting:
            pending.result()
        return "put"

    def detach(self, _: dict[str, Any]) -> str:
        if self.store is not None:
            self.store.close()
        return "detached"


def serve(fd: int) -> None:
    serve_lines(Worker(), fd)


if __name__ == "__main__":
    fork_for_each(serve)
