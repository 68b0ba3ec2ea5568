"""A rank with memory of its own, in a process of its own: `python -m tests.clients.native.worker C|Python`.

A line of its input is a JSON list: first the ticket, then ["fill", blocks, seed] or ["read", blocks]. Each has a line
as its answer.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgrpc.engine import Rank, RankTicket
from tests.clients.native.library import NativeRank
from tests.engine.made import BLOCKS, LAYER_BYTES, LAYERS, made_bytes


class Worker:
    """A worker process, seen from the test."""

    def __init__(self, kind: str, ticket: RankTicket) -> None:
        command = [sys.executable, "-m", "tests.clients.native.worker", kind]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ask(ticket.socket_path, ticket.secret.hex(), ticket.memory_bytes, ticket.comes_back_s)

    def ask(self, *line: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(line), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def fill(self, blocks: Sequence[int], seed: int) -> NDArray[np.uint8]:
        """Puts bytes that follow from the seed into blocks, and returns them."""
        self.ask("fill", list(blocks), seed)
        return made_bytes(blocks, seed)

    def read(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        found = bytes.fromhex(self.ask("read", list(blocks)))
        return np.frombuffer(found, np.uint8).reshape(LAYERS, len(blocks), LAYER_BYTES)

    def close(self) -> None:
        """Ends the worker in order."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            assert self.process.wait(30.0) == 0
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


def say(answer: str) -> None:
    sys.stdout.write(f"{json.dumps(answer)}\n")
    sys.stdout.flush()


def main() -> None:
    socket_path, secret, memory_bytes, comes_back_s = json.loads(sys.stdin.readline())
    ticket = RankTicket(socket_path, bytes.fromhex(secret), memory_bytes, comes_back_s)
    layers = [np.zeros((BLOCKS, LAYER_BYTES), np.uint8) for _ in range(LAYERS)]  # a segment each
    rank = NativeRank(ticket, own=layers) if sys.argv[1] == "C" else Rank(ticket, tensors=layers)
    with closing(rank):
        say("attached")
        for line in sys.stdin:
            match json.loads(line):
                case ["fill", blocks, seed]:
                    for layer, made in zip(layers, made_bytes(blocks, seed), strict=True):
                        layer[blocks] = made
                    answer = "filled"
                case ["read", blocks]:
                    answer = b"".join(layer[blocks].tobytes() for layer in layers).hex()
                case unknown:
                    raise ValueError(unknown)
            say(answer)


if __name__ == "__main__":
    main()
