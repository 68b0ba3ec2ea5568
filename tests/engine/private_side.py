"""Engines of two ranks, whose worker processes bring their own memory: torch tensors."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

from kvgrpc.engine import Engine
from tests.engine.made import layout, made_bytes
from tests.engine.support import Asked, Lead, Side

Teams = tuple[list[Asked], list[Asked]]
"""Workers of the source and of the destination."""


class PrivateSide(Side):
    """An engine with two workers."""

    def __init__(
        self,
        lead: Lead,
        workers: Sequence[Asked],
        *data_paths: str,
        limits: Sequence[float | None] = (None, None),
        remote: Mapping[int, str] = MappingProxyType({}),
        credentials: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Attaches an engine and its workers. `limits` holds each worker's bandwidth limit in bytes per second.
        `remote` maps ranks that attach over the network to the address to use; "" means the lead's address. They show
        `credentials`.
        """
        self.lead = lead
        self.engine = Engine.attach(lead.socket_path, pool=layout(), private_memory=True, world_size=2)
        self.ranks = []
        self.workers = tuple(workers)
        ticket, address = self.engine.ticket, self.engine.remote_ticket.address
        for rank, worker in enumerate(self.workers):
            worker.send(
                op="attach", socket_path=ticket.socket_path, secret=ticket.secret.hex(),
                memory_bytes=ticket.memory_bytes, rank=rank, data_paths=data_paths, limit=limits[rank],
                address=(remote[rank] or address) if rank in remote else "", credentials=dict(credentials),
            )  # fmt: skip
        assert [worker.answer() for worker in self.workers] == ["attached"] * 2

    def fill_all(self, blocks: Sequence[int], seed: int) -> list[str]:
        """Fills each rank's blocks with different bytes. Returns what `read_all` returns where they arrive."""
        for rank, worker in enumerate(self.workers):
            assert worker.ask(op="fill", blocks=blocks, seed=seed + rank) == "filled"
        return [hashlib.sha256(made_bytes(blocks, seed + r).tobytes()).hexdigest() for r in range(2)]

    def read_all(self, blocks: Sequence[int]) -> list[str]:
        return [worker.ask(op="read", blocks=blocks) for worker in self.workers]

    def close(self) -> None:
        """Closes the engine and its workers. Killed workers are skipped."""
        self.engine.close()
        for worker in self.workers:
            answer = None
            with suppress(AssertionError, OSError):
                answer = worker.ask(op="detach")
            assert answer in (None, "detached"), answer
