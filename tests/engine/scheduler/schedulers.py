"""Schedulers of engines, with helpers for the life of a request."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvgrpc.core.policy.values import Give, ModeChoice, News, Outcome, Rules
from kvgrpc.engine.scheduler import TAKEN_BACK_S, ScheduledRequest, Scheduler
from tests.engine.support import WAIT_S, Side, new_key, tokens
from tests.service.engines import wait_until

PROMPT = tokens(40)
TABLE, TARGET = [[1, 2, 9]], [[30, 31, 5]]
COMPLETE = Outcome.COMPLETE
R = "r1"


class At:
    """A scheduler on one side."""

    def __init__(
        self, side: Side, *, taken_back_s: float = TAKEN_BACK_S, renew_s: float = 1.0, takes_parts: bool = True,
        **rules: Any,
    ) -> None:  # fmt: skip
        self.side = side
        self.scheduler = Scheduler(
            side.engine, Rules((), **rules), taken_back_s=taken_back_s, renew_s=renew_s, takes_parts=takes_parts
        )
        self.news: list[News] = []

    def until(self, done: Callable[[], bool]) -> None:
        def look() -> bool:
            self.news += self.scheduler.step(0.05)
            return done()

        wait_until(look, WAIT_S, lambda: self.news)

    def told(self, kind: type[Any]) -> Any:
        """Waits for the next news of a kind and removes it. Other news stay."""
        found: list[News] = []

        def look() -> bool:
            found[:] = [news for news in self.news if isinstance(news, kind)]
            return bool(found)

        self.until(look)
        self.news.remove(found[0])
        return found[0]

    def prefilled(self, wanted: ScheduledRequest, *, seed: int = 1, step: int = 0) -> bytes:
        """Computes a prompt and hands it over. Returns the grant, or b"" without one."""
        self.scheduler.arrived(wanted)
        self.scheduler.allocated(wanted.request_id, TABLE, 0, 0)
        self.side.fill(TABLE[0], seed)
        finished = self.scheduler.finished(wanted.request_id, wanted.prompt, TABLE, len(wanted.prompt), COMPLETE, step)
        assert finished.keep
        self.scheduler.step()
        return self.scheduler.grant(wanted.request_id)

    def load(self, computed: int = 0) -> int:
        """Allocates blocks for all tokens that match. Returns their number."""
        found = self.scheduler.match(R, computed).tokens
        self.scheduler.allocated(R, TARGET, computed, found)
        return found


def give(mode: ModeChoice = ModeChoice.PULL, **fields: Any) -> ScheduledRequest:
    return ScheduledRequest(R, PROMPT, transfer_key=new_key(), give=Give(mode), **fields)


def same(p: At, d: At, blocks: Sequence[int] = (0, 1, 2)) -> bool:
    source, target = [TABLE[0][i] for i in blocks], [TARGET[0][i] for i in blocks]
    return np.array_equal(p.side.read(source), d.side.read(target))
