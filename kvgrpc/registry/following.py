"""Keeps a directory as its registry says, and its engines as their leads answer.

A registry that breaks off is watched again after a pause, from a new listing. Until then the last list stays.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from kvgrpc.errors import KVGrpcError
from kvgrpc.fleet.directory import Directory, HealthCheck
from kvgrpc.registry.base import EntryChanged, EntryRemoved, Registry, RegistryListing, RegistryNews

_log = logging.getLogger(__name__)
PAUSE_MIN_S, PAUSE_MAX_S = 0.1, 5.0
"""First and longest pause before a registry is asked again, in seconds."""
CHECK_TIMEOUT_S = 2.0
"""Deadline of a health check, in seconds."""
CHECKS_MAX = 64
"""Maximum number of health checks at a time."""
LOOK_S = 0.1
"""Time between two looks for checks that are due, in seconds. A look's checks begin a few at a time within it."""
APART_S = 0.01
"""Shortest pause between checks of one look, in seconds. Each check alone would wake the loop far more often."""
REASONS_MAX = 4
"""Maximum number of reasons that are logged for one outage."""
AskHealth = Callable[[HealthCheck], Awaitable[bool]]
"""Asks a lead whether it serves, as the engine that its entry names."""


class DirectoryFollower:
    """Follows one registry, until `stop`."""

    def __init__(
        self, directory: Directory, registry: Registry, ask: AskHealth, heard: Callable[[], None] | None = None
    ) -> None:
        """`heard` is called after each of the registry's news."""
        self.directory = directory
        self._registry = registry
        self._ask = ask
        self._heard = heard
        self._tasks: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(CHECKS_MAX)

    def start(self) -> None:
        for work in (self._watch(), self._check()):
            self._begin(asyncio.create_task(work))

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._registry.close()

    def _begin(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self) -> None:
        pause_s, said = PAUSE_MIN_S, set[str]()
        while True:
            try:
                async with contextlib.aclosing(self._registry.watch()) as news:  # type: ignore[type-var] # a generator
                    async for one in news:
                        self._take(one)
                        pause_s = PAUSE_MIN_S
            except KVGrpcError as error:
                if self.directory.stale_s(_now()) is None:
                    said.clear()
                if str(error) not in said and len(said) < REASONS_MAX:  # each once for each outage
                    said.add(str(error))
                    _log.warning("%s; the last list of %d engines stays in use", error, len(self.directory))
                self.directory.broken(_now())
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def _take(self, news: RegistryNews) -> None:
        match news:
            case RegistryListing():
                self.directory.listed(news.entries)
            case EntryChanged():
                self.directory.changed(news.key, news.value, news.revision)
            case EntryRemoved():
                self.directory.removed(news.key, news.revision)
        if self._heard is not None:
            self._heard()

    async def _check(self) -> None:
        while True:
            began = _now()
            due = self.directory.checks_due(began)
            for place, check in enumerate(due):  # all at once would hold up the loop, and callers with it
                early_s = began + LOOK_S * place / len(due) - _now()
                if early_s > APART_S:
                    await asyncio.sleep(early_s)
                self._begin(asyncio.create_task(self._check_one(check)))
            await asyncio.sleep(began + LOOK_S - _now())

    async def _check_one(self, check: HealthCheck) -> None:
        async with self._places:
            try:
                async with asyncio.timeout(CHECK_TIMEOUT_S):
                    serves = await self._ask(check)
            except (KVGrpcError, TimeoutError):
                serves = False
        (self.directory.answered if serves else self.directory.failed)(check, _now())


def _now() -> float:
    return asyncio.get_running_loop().time()
