"""Workers whose ranks have shares of one model's KV in their own layouts, driven by JSON lines.

{"op": "attach", "ticket", "rank", "data_paths", "split"}   `split`: arguments of `made_split`
{"op": "fill", "blocks", "begin"}
{"op": "check", "blocks", "begin", "tokens"}    answers "" or an error text
{"op": "step_done", "step"}
{"op": "clear"}
{"op": "detach"}
"""

from typing import Any

from kvgrpc.engine import Rank, RankTicket
from tests.core.split_kv import made_split
from tests.engine.forked import fork_for_each
from tests.engine.workers import serve_lines


class SplitWorker:
    """A worker: one rank with memory of its own."""

    def __init__(self) -> None:
        self.rank: Rank | None = None

    def attach(self, line: dict[str, Any]) -> str:
        self.kv, self.number = made_split(**line["split"]), line["rank"]
        memory = self.kv.memories[self.number]
        ticket = RankTicket(**line["ticket"] | {"secret": bytes.fromhex(line["ticket"]["secret"])})
        self.rank = Rank(ticket, self.number, [memory], data_paths=tuple(line["data_paths"]))
        return "attached"

    def fill(self, line: dict[str, Any]) -> str:
        self.kv.fill(line["blocks"], line["begin"], ranks=[self.number])
        return "filled"

    def check(self, line: dict[str, Any]) -> str:
        try:
            self.kv.check(line["blocks"], range(*line["tokens"]), line["begin"], ranks=[self.number])
        except AssertionError as error:
            return str(error) or "other bytes"
        return ""

    def step_done(self, line: dict[str, Any]) -> str:
        assert self.rank is not None
        self.rank.step_done(line["step"])
        return "reported"

    def clear(self, _: dict[str, Any]) -> str:
        self.kv.clear()
        return "cleared"

    def detach(self, _: dict[str, Any]) -> str:
        if self.rank is not None:
            self.rank.close()
        self.rank = None
        return "detached"


def serve(fd: int) -> None:
    serve_lines(SplitWorker(), fd)


if __name__ == "__main__":
    fork_for_each(serve)
