"""A worker of an engine as a process: a rank with private memory, torch CPU tensors, driven by JSON lines.

{"op": "attach", "socket_path", "secret", "memory_bytes", "rank", "data_path"}
{"op": "fill", "blocks", "seed"}     made_bytes(blocks, seed), as other processes can compute them too
{"op": "read", "blocks"}             SHA-256 of the blocks
{"op": "step_done", "step"}
{"op": "detach"}
"""

import hashlib
import json
import sys
from typing import Any

import torch

from kvgrpc.engine import LeadDied, Rank, RankTicket
from tests.engine.support import BLOCKS, LAYER_BYTES, LAYERS, made_bytes


class Worker:
    """One worker; a tensor a layer."""

    def __init__(self) -> None:
        self.layers = [torch.zeros(BLOCKS, LAYER_BYTES, dtype=torch.uint8) for _ in range(LAYERS)]
        self.rank: Rank | None = None

    def attach(self, line: dict[str, Any]) -> str:
        ticket = RankTicket(line["socket_path"], bytes.fromhex(line["secret"]), line["memory_bytes"])
        self.rank = Rank(ticket, line["rank"], self.layers, data_paths=(line["data_path"],))
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

    def detach(self, _: dict[str, Any]) -> str:
        if self.rank is not None:
            self.rank.close()
        self.rank = None
        return "detached"


def main() -> None:
    worker = Worker()
    for text in sys.stdin:
        line = json.loads(text)
        print(json.dumps(getattr(worker, line["op"])(line)), flush=True)
    worker.detach({})


if __name__ == "__main__":
    main()
