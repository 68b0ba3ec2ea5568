"""Worker processes with private memory (torch CPU tensors), driven by JSON lines.

    {"op": "attach", "socket_path", "secret", "memory_bytes", "rank", "data_paths", "limit", "address",
     "credentials"}
    {"op": "fill", "blocks", "seed"}     made_bytes(blocks, seed), as the test can compute them too
    {"op": "read", "blocks"}             answers the SHA-256 of the blocks
    {"op": "step_done", "step"}
    {"op": "layers_done", "step", "first", "count"}
    {"op": "link_pid"}   answers the PID of the rank link, for a rank that attached over the network
    {"op": "detach"}     answers "detached", or "not at rest" if its memory may still be accessed

One process imports torch, which takes seconds, and forks a worker for every descriptor that it is sent.
"""

import hashlib
import json
import socket
from typing import Any

import torch

from kvgrpc.engine import LeadDied, Rank, RankCredentials, RankTicket
from kvgrpc.errors import InternalError
from tests.engine.forked import fork_for_each
from tests.engine.made import BLOCKS, LAYER_BYTES, LAYERS, made_bytes


class Worker:
    """A worker with one tensor per layer."""

    def __init__(self) -> None:
        self.layers = [torch.zeros(BLOCKS, LAYER_BYTES, dtype=torch.uint8) for _ in range(LAYERS)]
        self.rank: Rank | None = None

    def attach(self, line: dict[str, Any]) -> str:
        known = line["socket_path"], bytes.fromhex(line["secret"]), line["memory_bytes"]
        ticket = RankTicket(*known, comes_back_s=line.get("comes_back_s", 0.0), address=line.get("address", ""))
        limit, paths = line.get("limit"), tuple(line["data_paths"])
        shown = RankCredentials(**line["credentials"]) if line.get("credentials") else None
        self.rank = Rank(
            ticket, line["rank"], self.layers, data_paths=paths, bandwidth_limit_bytes_per_s=limit, credentials=shown
        )
        return "attached"

    def fill(self, line: dict[str, Any]) -> str:
        for layer, made in zip(self.layers, made_bytes(line["blocks"], line["seed"]), strict=True):
            layer[line["blocks"]] = torch.from_numpy(made)
        return "filled"

    def read(self, line: dict[str, Any]) -> str:
        return hashlib.sha256(b"".join(layer[line["blocks"]].numpy().tobytes() for layer in self.layers)).hexdigest()

    def step_done(self, line: dict[str, Any]) -> str:
        assert self.rank is not None
        try:
            self.rank.step_done(line["step"])
        except LeadDied:
            return "LeadDied"
        return "reported"

    def layers_done(self, line: dict[str, Any]) -> str:
        assert self.rank is not None
        self.rank.layers_done(line["step"], line["first"], line["count"])
        return "reported"

    def link_pid(self, _: dict[str, Any]) -> int:
        assert self.rank is not None
        assert self.rank._link is not None
        return self.rank._link.pid

    def detach(self, _: dict[str, Any]) -> str:
        rank, self.rank = self.rank, None
        try:
            if rank is not None:
                rank.close()
        except InternalError:
            return "not at rest"
        return "detached"


def serve(fd: int) -> None:
    serve_lines(Worker(), fd)


def serve_lines(worker: Any, fd: int) -> None:
    """Answers one test's lines until the test hangs up, then detaches the worker."""
    with socket.socket(fileno=fd) as test, test.makefile("r") as lines:
        for text in lines:
            line = json.loads(text)
            test.sendall(json.dumps(getattr(worker, line["op"])(line)).encode() + b"\n")
    assert worker.detach({}) == "detached"


if __name__ == "__main__":
    fork_for_each(serve)
