"""Minimal engines, each with a lead of its own: P gives, D takes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from examples.minimal_engine.engine import MinimalEngine
from kvgrpc.engine.transfers.handles import Handle
from tests.engine.support import Lead

BLOCKS = 32


class Led(MinimalEngine):
    """An engine and its lead."""

    def __init__(self, lead: Lead, ranks: int, window_tokens: int) -> None:
        super().__init__(lead.socket_path, blocks=BLOCKS, ranks=ranks, window_tokens=window_tokens)
        self.lead = lead

    def moved(self, transfer: Handle) -> dict[int, int]:
        """Returns the bytes of a transfer, by rank."""
        return {row.rank: row.moved_bytes for row in self.lead.transfer(transfer.transfer_id).paths}

    def close(self) -> None:
        self.engine.close()
        for rank in self.ranks:
            rank.close()


Pair = tuple[Led, Led]


@contextmanager
def led_pair(folder: Path, *, ranks: int = 1, windows: tuple[int, int] = (0, 0)) -> Iterator[Pair]:
    """Yields P and D, each with `ranks` ranks and its own window, in tokens."""
    with ExitStack() as stack:
        leads = []
        for name in ("P", "D"):
            leads.append(Lead(folder, name))
            stack.callback(leads[-1].close)
        engines = []
        for lead, window in zip(leads, windows, strict=True):
            engines.append(Led(lead.wait_ready(), ranks, window))
            stack.callback(engines[-1].close)
        yield engines[0], engines[1]
