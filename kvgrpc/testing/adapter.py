"""EngineAdapter: the few things that the kit asks of an author's engine; and the bytes of its blocks."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.engine import Engine

Blocks = Sequence[Sequence[int]]
"""Block ids in token order, a list for each group."""


class EngineAdapter(Protocol):
    """An author's engine, which prefills and decodes. A small pool of 16 to 64 blocks makes plays short and sharp."""

    @property
    def engine(self) -> Engine: ...

    def give(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Takes a request in whose prompt is prefilled here and handed over."""

    def given(self, request_id: str) -> dict[str, Any] | None:
        """Returns the `kv_transfer_params` of a hand-over once there are some."""

    def take(self, request_id: str, token_ids: Sequence[int], kv_transfer_params: dict[str, Any]) -> None:
        """Takes a request in whose prompt was prefilled elsewhere. An id may come again once its request was aborted;
        an engine that refuses it until the first one's blocks are back raises a KVGrpcError.
        """

    def taken(self, request_id: str) -> int | None:
        """Returns how many tokens of KV came from elsewhere, once the request can decode, or failed; 0: none. None: it
        waits.
        """

    def schedule(self) -> None:
        """Passes once through the scheduler: hears events, gives blocks, begins a step, hands over."""

    def compute(self) -> None:
        """Finishes the steps that were begun, and reports them. An engine whose steps do not outlast `schedule` does
        nothing here.
        """

    def abort(self, request_id: str) -> None:
        """Ends a request as if its client had hung up, at whatever stage."""

    def preempt(self, request_id: str) -> None:
        """Takes the blocks of a hand-over back, for other requests. NotImplementedError: this engine never does."""

    def blocks(self, request_id: str) -> Blocks:
        """Returns the blocks of the latest request with this id, also after it was handed over; none yet: empty lists.
        In a group with a window they begin where a hand-over of the prompt begins.
        """

    def free_blocks(self) -> Blocks:
        """Returns what the next request may be given, in any order. Cached blocks that nobody uses count."""

    def read(self, group: int, block: int) -> bytes:
        """Returns a block's bytes as `BlockMemory` does: rank by rank, region by region."""

    def fill(self, group: int, block: int, byte: int) -> None:
        """Sets every byte of a block."""


class FullAdapter(EngineAdapter, Protocol):
    """An adapter with all optional methods. One that lacks a method leaves out the plays that need it."""

    def push(self, request_id: str, token_ids: Sequence[int], transfer_key: bytes) -> None:
        """Takes a request in whose prompt is prefilled here and pushed under the key. Another engine registers for it,
        before or after this call, or never. An id may come again as in `take`.
        """

    def reserve(self, request_id: str, token_ids: Sequence[int], transfer_key: bytes, source_address: str) -> None:
        """Takes a request in whose prompt the lead at that address pushes under the key. `taken` says what came. An id
        may come again as in `take`.
        """

    def compute_layer(self) -> None:
        """Computes one more layer of the first step that was begun, if any, and reports it."""

    def compute_rank(self, rank: int) -> None:
        """Finishes the steps that were begun, on one of several ranks alone, which reports them."""


class BlockMemory:
    """The blocks of a pool in host memory."""

    def __init__(self, pool: PoolLayout, ranks: Sequence[Sequence[NDArray[np.uint8]]]) -> None:
        """`ranks`: for each rank its memory as flat arrays of bytes, in the order of the pool's offsets."""
        self._pool, self._ranks = pool, ranks

    def read(self, group: int, block: int) -> bytes:
        """Returns the block's bytes on all ranks."""
        return b"".join(part.tobytes() for part in self._parts(group, block))

    def fill(self, group: int, block: int, byte: int) -> None:
        """Sets every byte of the block on all ranks."""
        for part in self._parts(group, block):
            part[:] = byte

    def _parts(self, group: int, block: int) -> Iterator[NDArray[np.uint8]]:
        for number, arrays in enumerate(self._ranks):
            stage = number * self._pool.stages // len(self._ranks)
            for region in self._pool.by_group[group]:
                offset = region.offset + block * region.stride_bytes
                for array in arrays if region.stage == stage else ():
                    if 0 <= offset < array.size:
                        yield array[offset : offset + region.block_bytes]
                    offset -= array.size
