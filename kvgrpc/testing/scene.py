"""Scene: what every play does with the two engines: prompts, steps, waits with a deadline, and comparisons of bytes."""

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, cast
from unittest import SkipTest

from kvgrpc.core.values.layout import GroupKind
from kvgrpc.engine import HandOver, Pull, Reservation
from kvgrpc.testing.adapter import Blocks, EngineAdapter, FullAdapter
from kvgrpc.testing.counterpart import Counterpart
from kvgrpc.testing.late_events import LateEvents
from kvgrpc.testing.promises import BrokenPromise

WAIT_S = 30.0
"""Timeout for what an engine that keeps its promises does within milliseconds, in seconds."""
QUIET_S = 0.25
"""Time in which something too early would happen, in seconds. Only a broken promise is seen sooner by a longer wait."""
POLL_S = 0.002
"""Time that a step waits for news of the counterpart, in seconds."""
TOKEN_IDS = range(1, 200)
"""Token ids of prompts: small, so that every vocabulary has them."""


class Scene:
    """The author's engine, its events, and the counterpart, in a play of one promise."""

    def __init__(self, promise: str, engine: EngineAdapter, other: Counterpart, events: LateEvents) -> None:
        self.promise, self.engine, self.other, self.events = promise, engine, other, events
        self.groups = engine.engine.pool.groups
        self._drawn = random.Random(promise)  # noqa: S311 - prompts differ from play to play, and that is all
        self.free_at_first = self.free()

    # -- what is looked at

    def free(self) -> list[list[int]]:
        """Returns the engine's free blocks, in order."""
        return [sorted(ids) for ids in self.engine.free_blocks()]

    def read(self, request_id: str) -> list[list[bytes]]:
        """Returns the bytes of a request's blocks."""
        blocks = self.engine.blocks(request_id)
        return [[self.engine.read(group, block) for block in ids] for group, ids in enumerate(blocks)]

    def ensure(self, kept: bool, seen: str) -> None:
        """Raises BrokenPromise unless the promise is kept."""
        if not kept:
            raise BrokenPromise(self.promise, seen)

    def ensure_held(self, blocks: Blocks, while_: str) -> None:
        """Raises BrokenPromise if blocks are free."""
        free = [sorted(set(ids) & set(held)) for ids, held in zip(self.free(), blocks, strict=True)]
        self.ensure(not any(free), f"blocks {free} are free {while_}")

    def ensure_same(self, got: list[list[bytes]], sent: list[list[bytes]], tokens: int, seen: str) -> None:
        """Raises BrokenPromise if blocks that `tokens` tokens fill differ."""
        for group, here, there in zip(self.groups, got, sent, strict=True):
            whole = tokens // group.block_tokens - group.first_of(tokens)
            if group.kind is not GroupKind.STATE:  # a state is written by the next token
                self.ensure(here[:whole] == there[:whole], f"{seen}, in group {group.name}")

    # -- what happens

    def able(self, method: str) -> FullAdapter:
        """Returns the engine if its adapter has an optional method. Raises SkipTest."""
        if not hasattr(self.engine, method):
            raise SkipTest(f"this engine's adapter has no method {method}, which this play needs")
        return cast(FullAdapter, self.engine)

    def step(self, *, computes: bool = True) -> None:
        """Lets both engines make a step."""
        self.engine.schedule()
        if computes:
            self.engine.compute()
        self.other.poll(POLL_S)

    def until(
        self, done: Callable[[], bool], never: str, *, computes: bool = True, compute: Callable[[], None] | None = None
    ) -> None:
        """Steps until something is so. Raises BrokenPromise if it never is. A step with `compute` is late."""
        deadline = time.monotonic() + WAIT_S
        while not done():
            self.ensure(time.monotonic() < deadline, never)
            self.step(computes=computes and compute is None)
            if compute is not None:
                self.quiet(done)
                compute()

    def quiet(self, happened: Callable[[], bool], *, schedules: bool = False) -> None:
        """Waits for what should not happen yet, and not longer than QUIET_S."""
        deadline = time.monotonic() + QUIET_S
        while time.monotonic() < deadline and not happened():
            if schedules:
                self.engine.schedule()
            self.events.gather()
            self.other.poll(POLL_S)

    def until_kept(self) -> None:
        """Steps until an end is there that the engine does not know of yet."""
        self.until(lambda: bool(self.events.kept), "a transfer to it never ends")

    def until_blocks(self, request_id: str, *, computes: bool = True) -> None:
        """Steps until a request has blocks."""
        self.until(lambda: any(self.engine.blocks(request_id)), "it gives no blocks to a request", computes=computes)

    def until_over(self, handle: Pull | Reservation, never: str) -> None:
        """Steps until a transfer of the counterpart is over."""
        self.until(lambda: handle in self.other.over, never)

    def until_all_free(self, after: str) -> None:
        """Steps until the engine has the free blocks that it had at first."""
        self.until(
            lambda: self.free() == self.free_at_first, f"its free blocks are not those of before the play {after}"
        )

    def prompt(self, blocks: float = 2.5) -> list[int]:
        """Returns a new prompt that fills so many blocks."""
        tokens = max(group.block_tokens for group in self.groups if group.kind is not GroupKind.STATE)
        return self._drawn.choices(TOKEN_IDS, k=int(blocks * tokens))

    def give(self, request_id: str, ids: Sequence[int], *, computes: bool = True) -> dict[str, Any]:
        """Has the author's engine prefill and hand over. Returns its params."""
        self.engine.give(request_id, ids)
        self.until(
            lambda: self.engine.given(request_id) is not None, "it hands nothing over of a prompt", computes=computes
        )
        params = self.engine.given(request_id)
        assert params is not None
        return params

    def take(self, request_id: str, ids: Sequence[int], handover: HandOver) -> None:
        """Has the author's engine take a prompt, up to where it has blocks for it."""
        self.engine.take(request_id, ids, handover.kv_transfer_params)
        self.until_blocks(request_id)

    def until_taken(self, request_id: str) -> int:
        """Steps until a request waits no more. Returns how many tokens came."""
        self.until(lambda: self.engine.taken(request_id) is not None, "a request waits for ever")
        return self.engine.taken(request_id) or 0

    def fetch(self, params: dict[str, Any], ids: Sequence[int]) -> Pull:
        """Has the counterpart take a whole prompt."""
        pull = self.other.pull(params, ids)
        self.finish(pull)
        return pull

    def finish(self, pull: Pull) -> None:
        """Has the counterpart read, and waits for the end."""
        self.other.start(pull)
        self.until_over(pull, "a reader of its blocks never ends")

    def ensure_fetched(self, pull: Pull | Reservation, truth: list[list[bytes]], how: str = "") -> None:
        """Raises BrokenPromise unless the counterpart received these bytes."""
        failed = self.other.failed.get(pull)
        self.ensure(failed is None, f"a reader failed: {failed and failed.message}")
        self.ensure(self.other.bytes[pull] == truth, f"a reader received other bytes than were handed over{how}")
