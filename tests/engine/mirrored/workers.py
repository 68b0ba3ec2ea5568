"""Workers as processes whose memory is a fake device's, driven by JSON lines like those of tests/engine/workers.py."""

import hashlib
from typing import Any

from kvgrpc.engine import Rank, RankTicket
from tests.engine.forked import fork_for_each
from tests.engine.mirrored.fake_device import FakeDevice
from tests.engine.workers import serve_lines

DELAY_S = 0.01


class Worker:
    """A worker with a fake device."""

    def __init__(self) -> None:
        self.device = FakeDevice(DELAY_S)
        self.rank: Rank | None = None

    def attach(self, line: dict[str, Any]) -> str:
        ticket = RankTicket(line["socket_path"], bytes.fromhex(line["secret"]), line["memory_bytes"])
        self.rank = Rank(ticket, line["rank"], device=self.device, data_paths=tuple(line["data_paths"]))
        return "attached"

    def fill(self, line: dict[str, Any]) -> str:
        self.device.fill(line["blocks"], line["seed"])
        return "filled"

    def read(self, line: dict[str, Any]) -> str:
        return hashlib.sha256(self.device.read(line["blocks"]).tobytes()).hexdigest()

    def detach(self, _: dict[str, Any]) -> str:
        rank, self.rank = self.rank, None
        if rank is not None:
            rank.close()
        return "detached"


def serve(fd: int) -> None:
    serve_lines(Worker(), fd)


if __name__ == "__main__":
    fork_for_each(serve)
