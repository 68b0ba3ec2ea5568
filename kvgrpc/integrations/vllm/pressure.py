"""Pressure: takes back the blocks that vLLM lacks from hand-overs for which nobody has come.

vLLM tells no connector that a request got no blocks: it asks what can be loaded for the first request that waits, and
then allocates, or goes on without it. So a request that was asked for in a step and not allocated lacks blocks, unless
there were enough. A request that computes and gets no block is preempted without notice, so blocks that the next step
needs are sought one step ahead.

Blocks are asked for in the name of the oldest request that waits. That request may stand behind the first one of vLLM's
queue, which then gets the blocks in its name: nobody behind the first request gets blocks before it. So engines that
wait for each other's blocks give way to the oldest request of all, wherever it stands.
"""

import logging
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from kvgrpc.core.values.layout import GroupKind
from kvgrpc.errors import DeadlineExceeded, KVGrpcError, Unavailable
from kvgrpc.integrations.vllm.prompts import arrived_us

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvgrpc.core.actions import Reclaimed
    from kvgrpc.core.values.layout import Group
    from kvgrpc.engine.scheduler import Scheduler

_log = logging.getLogger(__name__)
AGAIN_S = 0.005
"""Minimum delay after an answer that nothing can be taken back, in seconds; longer if the lead said so."""
LONGEST_S = 0.1
ANSWER_S = 0.5
"""Maximum time that a step waits for an answer, in seconds. A lead that hangs costs it once; others take 1 ms."""
STATES = 3
"""Most states of a request, where vLLM caches states: the last one, the one computed from it, and a cached one."""


class Pressure:
    """The pressure on the blocks of one engine."""

    def __init__(self, scheduler: "Scheduler", groups: Sequence["Group"], step_tokens: int) -> None:
        """`step_tokens`: maximum number of a request's tokens in steps that are not over."""
        self._scheduler = scheduler
        self._groups = groups
        self._step_tokens = step_tokens
        self._unplaced: tuple[Request, int] | None = None
        """The request that was asked for last and has no blocks, with the number of its tokens that were found here."""
        self._ask_at = 0.0
        self._began: dict[str, int] = {}
        """Begin of each request that has not left, in microseconds since the Unix epoch."""
        self._waiting: set[str] = set()
        """Requests of `_began` that have no blocks."""
        self._refused = False
        """True if the log says already that the lead refused."""

    def arrived(self, request: "Request") -> None:
        self._began[request.request_id] = arrived_us(request)
        self._waiting.add(request.request_id)

    def began(self, request_id: str, time_us: int) -> None:
        """Notes that a request began before its engine heard of it."""
        self._began[request_id] = time_us

    def left(self, request_id: str) -> None:
        self._began.pop(request_id, None)
        self._waiting.discard(request_id)

    def asked_for(self, request: "Request", computed_tokens: int) -> None:
        """Notes a request for which vLLM is about to allocate blocks."""
        self._unplaced = request, computed_tokens

    def placed(self, request_id: str) -> None:
        self._waiting.discard(request_id)
        if self._unplaced is not None and self._unplaced[0].request_id == request_id:
            self._unplaced = None

    def relieve(self, output: "SchedulerOutput", pool: Any) -> None:
        """Takes blocks back if `pool`, vLLM's BlockPool, is short of them after `output` was scheduled.
        `Scheduler.step` tells whose.
        """
        free = pool.get_num_free_blocks()
        lacking = self._lacking(output, free)
        self._unplaced = None
        self._waiting |= self._began.keys() & (output.preempted_req_ids or ())
        now = time.monotonic()
        if lacking <= 0 or now < self._ask_at:
            return
        grows = self._of_next_step(output) > free
        request_id, began_us = self._oldest(output.num_scheduled_tokens if grows else ())
        found = self._taken_back(min(lacking, pool.num_gpu_blocks), request_id, began_us)
        if found is None or not found.enough:
            soon_s = found.later[0].in_s if found is not None and found.later else LONGEST_S
            self._ask_at = now + min(max(soon_s, AGAIN_S), LONGEST_S)

    def _taken_back(self, count: int, request_id: str, began_us: int) -> "Reclaimed | None":
        """Takes `count` blocks back for a request. Returns None if its lead died, hangs or refuses."""
        try:
            return self._scheduler.blocks_needed(
                count, request_time_us=began_us, request_id=request_id, timeout_s=ANSWER_S
            )
        except (Unavailable, DeadlineExceeded):
            pass
        except KVGrpcError as error:
            if not self._refused:
                self._refused = True
                _log.error("the lead takes no blocks back: %s", error)
        return None

    def _oldest(self, computing: Collection[str]) -> tuple[str, int]:
        """Returns the oldest request that waits for blocks or is `computing`, and its begin; ("", 0): none."""
        known = self._began.keys() & (self._waiting | set(computing))
        oldest = min(known, key=lambda request_id: (self._began[request_id], request_id), default="")
        return oldest, self._began.get(oldest, 0)

    def _lacking(self, output: "SchedulerOutput", free: int) -> int:
        """Returns the number of blocks that vLLM lacks. A waiting request counts as lacking at least one, unless the
        most that it can hold is free.
        """
        next_step = self._of_next_step(output)
        if self._unplaced is None:
            return next_step - free
        request, computed_tokens = self._unplaced
        if next_step + self._at_most(int(request.num_tokens)) <= free:
            return 0
        return max(1, next_step + self._at_least(int(request.num_tokens), computed_tokens) - free)

    def _at_most(self, tokens: int) -> int:
        """Returns the most blocks that a request holds for `tokens`; a window also has those of unfinished steps."""
        counts = [-(-tokens // group.block_tokens) for group in self._groups]
        for at, group in enumerate(self._groups):
            if group.kind is GroupKind.STATE:
                counts[at] = min(counts[at], STATES)
            elif group.window_tokens:
                counts[at] = min(counts[at], -(-(group.window_tokens + self._step_tokens) // group.block_tokens) + 1)
        return sum(counts)

    def _at_least(self, tokens: int, computed_tokens: int) -> int:
        """Returns the blocks for `tokens` that a request lacks when it has those for `computed_tokens`."""
        return sum(group.blocks_of(tokens) - group.held_of(tokens, computed_tokens) for group in self._groups)

    def _of_next_step(self, output: "SchedulerOutput") -> int:
        """Returns the number of blocks that the next step needs, since the last ones are full after this step."""
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        return sum(
            (computed.get(request_id, 0) + count) % group.block_tokens == 0
            for request_id, count in output.num_scheduled_tokens.items()
            for group in self._groups
        )
