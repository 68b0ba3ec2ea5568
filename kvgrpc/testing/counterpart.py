"""Counterpart: the other engine of a play, with the same pool, and a lead of its own."""

import os
import random
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import SkipTest

from kvgrpc.client import connect_sync
from kvgrpc.core.values.grants import from_json
from kvgrpc.engine import BlocksReturned, Engine, Failed, HandOver, Pull, Push, Rank, Received, Reservation, content
from kvgrpc.engine.transfers.handles import Handle
from kvgrpc.testing.adapter import BlockMemory, Blocks

BYTES = range(0x30, 0x40)
"""Bytes that blocks are filled with: as floats of any size they are small numbers."""
REST_S = 10.0
"""Timeout for the end of what an earlier play has begun, in seconds."""
POLL_S = 0.05
TTL_S = 600.0
"""Time for which what is handed over lasts, in seconds: longer than a play, so that only its reader ends it."""


class Counterpart(AbstractContextManager["Counterpart"]):
    """An engine without a model, whose blocks have made-up bytes."""

    def __init__(self, like: Engine) -> None:
        with connect_sync(like.address) as lead:
            described = lead.capabilities().engine
        ranks = described.world_size or 1
        self.engine = Engine.launch(pool=like.pool, world_size=ranks, weights_revision=described.weights_revision)
        self.world_size = ranks
        self._ranks = [Rank(self.engine.ticket, number) for number in range(ranks)]
        self._memory = BlockMemory(like.pool, [[rank.memory] for rank in self._ranks])
        self._free = [list(range(group.blocks)) for group in like.pool.groups]
        self._held: dict[Handle, list[list[int]]] = {}
        self._step = 0
        self._made = random.Random(1)  # noqa: S311 - bytes that differ
        self.bytes: dict[Handle, list[list[bytes]]] = {}
        """Bytes of each block that was handed over, and of each that was received, by group."""
        self.failed: dict[Handle, Failed] = {}
        self.over: set[Handle] = set()

    def give(self, token_ids: Sequence[int], *, late: bool = False) -> HandOver:
        """Hands a prompt over. A late one is read after the next `compute`."""
        blocks = self._filled(len(token_ids))
        handover = self.engine.finished_blocks(
            blocks, content(token_ids), transfer_key=os.urandom(16), ttl_s=TTL_S, after_step=(self._step + 1) * late
        )
        self._held[handover], self.bytes[handover] = blocks, self._read(blocks)
        self.engine.flush()
        return handover

    def pull(self, kv_transfer_params: dict[str, Any], token_ids: Sequence[int]) -> Pull:
        """Opens a pull, which holds the source's blocks and reads none before `start`."""
        pull = self.engine.pull(from_json(kv_transfer_params), content(token_ids))
        self.engine.flush()
        return pull

    def start(self, pull: Pull, *, late: bool = False) -> None:
        """Lets a pull read, at once or after the next `compute`."""
        self._held[pull] = self._blocks_of(pull.use_tokens)
        pull.start(self._held[pull], after_step=(self._step + 1) * late)
        self.engine.flush()

    def push(self, token_ids: Sequence[int], key: bytes, *, late: bool = False, whole: bool = True) -> Push:
        """Pushes a prompt to who registers under the key, after the next `compute` if it is late. One that is not
        whole lacks its last layer, which never comes. Raises SkipTest for one if no group has two layers.
        """
        layers = max(group.layers for group in self.engine.pool.groups) - 1
        if not whole and not layers:
            raise SkipTest("no group of this engine has two layers: a push of it has no part")
        blocks = self._filled(len(token_ids))
        push = self.engine.push(content(token_ids), transfer_key=key)
        after_step = (self._step + 1) * late
        push.finished(blocks, layers=None if whole else (0, layers), last=whole, after_step=after_step)
        self._held[push], self.bytes[push] = blocks, self._read(blocks)
        self.engine.flush()
        return push

    def reserve(self, token_ids: Sequence[int], key: bytes, source: str, *, late: bool = False) -> Reservation:
        """Registers for a push with the lead at the address `source`. A late one is filled after the next `compute`."""
        blocks = self._blocks_of(len(token_ids))
        reservation = self.engine.reserve(
            blocks, content(token_ids), transfer_key=key, source_address=source, after_step=(self._step + 1) * late
        )
        self._held[reservation] = blocks
        self.engine.flush()
        return reservation

    def take_back(self, handover: HandOver, byte: int) -> None:
        """Takes a hand-over back and uses its blocks for something else."""
        assert handover.take_back(), "this lead is on this host"
        for group, ids in enumerate(self._held[handover]):
            for block in ids:
                self._memory.fill(group, block, byte)
        self.engine.flush()

    def compute(self) -> None:
        """Ends a step: what is late may move."""
        self._step += 1
        for rank in self._ranks:
            rank.step_done(self._step)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Hears what became of its transfers."""
        for event in self.engine.poll(timeout_s):
            handle: Any = event.transfer
            if isinstance(event, Failed):
                self.failed[handle] = event
            if isinstance(event, Received):
                self.bytes[handle] = self._read(self._held[handle])
            if isinstance(event, Received | BlocksReturned):
                self.over.add(handle)
                for free, ids in zip(self._free, self._held.pop(handle, []), strict=False):
                    free.extend(ids)

    def rest(self) -> None:
        """Ends everything of an earlier play."""
        for handle in self._held:
            handle.cancel("the play is over")
        deadline = time.monotonic() + REST_S
        while self._held and time.monotonic() < deadline:
            self.poll(POLL_S)
        assert not self._held, "a counterpart whose blocks are in use after a play has no second one"

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        for rank in self._ranks:
            rank.close()

    def _filled(self, tokens: int) -> list[list[int]]:
        """Returns blocks with bytes that differ from block to block."""
        blocks = self._blocks_of(tokens)
        for group, ids in enumerate(blocks):
            for block in ids:
                self._memory.fill(group, block, self._made.choice(BYTES))
        return blocks

    def _blocks_of(self, tokens: int) -> list[list[int]]:
        counts = [group.blocks_of(tokens) for group in self.engine.pool.groups]
        return [[free.pop(0) for _ in range(count)] for free, count in zip(self._free, counts, strict=True)]

    def _read(self, blocks: Blocks) -> list[list[bytes]]:
        return [[self._memory.read(group, block) for block in ids] for group, ids in enumerate(blocks)]
