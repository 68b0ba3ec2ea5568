"""Entries of which a registry knows the address alone: the lead that answers there says which engine it is.

What a lead said stays when it does not answer the next time: a health check decides whether it is alive. Each lead is
asked again from time to time, because another life may have taken its address.
"""

import asyncio
import contextlib
import heapq
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from kvgrpc.errors import InvalidRequest, KVGrpcError
from kvgrpc.fleet.entry import EngineEntry, EngineRole
from kvgrpc.registry.base import EntryChanged, EntryRemoved, RegistryListing, RegistryNews, down

LIVES_MAX = 8
"""Maximum number of lives of one engine id that are remembered. Several live at a time if they share an id."""
CANCEL_S = 0.1
"""Time after which a task that was told to end is told again, in seconds."""
Introduce = Callable[[str], Awaitable[EngineEntry]]
"""Asks the lead at an address (host:port) for its entry. Raises KVGrpcError when no lead answers."""


@dataclass(frozen=True)
class Candidate:
    """An address of a registry, with what the registry itself says of the engine."""

    key: str
    address: str
    role: EngineRole | None = None
    """None: what the lead says."""
    tenant: str = ""
    host: str = ""
    draining: bool = False


@dataclass(frozen=True)
class IntroductionLimits:
    """The bounds and times of introductions."""

    candidates: int = 4_096
    asked_at_once: int = 32
    ask_every_s: float = 10.0
    """Time between two questions to one lead, in seconds."""
    retry_s: float = 1.0
    """Time after which a lead that did not answer is asked again, in seconds."""
    timeout_s: float = 2.0
    """Deadline of a question, in seconds. The first listing waits as long for the first answers."""
    lives: int = 8_192
    """Maximum number of engine ids whose lives are remembered."""


class LifeNumbers:
    """Numbers for lives, in the order in which they were met: an incarnation is a random name, and has no order."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._met: OrderedDict[str, dict[int, int]] = OrderedDict()

    def of(self, engine_id: str, incarnation: int) -> int:
        """Returns the number of a life, which is greater than those of all lives that were met before."""
        met = self._met.setdefault(engine_id, {})
        self._met.move_to_end(engine_id)
        if incarnation not in met:
            met[incarnation] = max(met.values(), default=0) + 1
        if len(met) > LIVES_MAX:
            del met[min(met, key=met.__getitem__)]
        if len(self._met) > self._most:
            self._met.popitem(last=False)
        return met[incarnation]


class Introductions:
    """Answers of the leads at the addresses of one registry. It outlives each watch of the registry."""

    def __init__(self, introduce: Introduce, limits: IntroductionLimits | None = None) -> None:
        self._introduce = introduce
        self._limits = limits or IntroductionLimits()
        self._candidates: dict[str, Candidate] = {}
        self._found = False
        self._said: dict[str, EngineEntry] = {}
        self._ask_at: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._values: dict[str, bytes] = {}
        self._changed: set[str] = set()
        self._revision = 0
        self._lives = LifeNumbers(self._limits.lives)
        self._wake = asyncio.Event()

    async def watch(self, found: AsyncIterator[Iterable[Candidate]]) -> AsyncIterator[RegistryNews]:
        """Tells the entries of what is found, each time in full. Raises RegistryDown when `found` does."""
        self._found, listed = False, False
        reading = asyncio.create_task(self._read(found))
        try:
            while not reading.done():
                await self._turn()
                if listed:
                    for one in self._news():
                        yield one
                elif self._found:
                    await self._ask_all()
                    yield self._listing()
                    listed = True
            # The registry is down, and the leads are not: one that has restarted meanwhile still introduces itself.
            await self._ask_all()
            for one in self._news():
                yield one
            await reading
        finally:
            await self._stop(reading)

    async def _read(self, found: AsyncIterator[Iterable[Candidate]]) -> None:
        try:
            async for candidates in found:
                self._take(candidates)
                self._found = True
            raise down("it ended")
        finally:
            self._wake.set()

    def _take(self, candidates: Iterable[Candidate]) -> None:
        there: dict[str, Candidate] = {}
        for one in candidates:
            if one.key in there or len(there) < self._limits.candidates:
                there[one.key] = one
        for key in self._candidates.keys() | there.keys():
            old, new = self._candidates.get(key), there.get(key)
            if old == new:
                continue
            self._changed.add(key)
            if new is None or old is None or old.address != new.address:
                self._forget(key)
            if new is not None:
                self._ask_at.setdefault(key, 0.0)
        self._candidates = there
        self._wake.set()

    def _forget(self, key: str) -> None:
        self._said.pop(key, None)
        self._ask_at.pop(key, None)
        asking = self._asking.pop(key, None)
        if asking is not None:
            asking.cancel()

    async def _turn(self) -> None:
        """Asks the leads that are due, and waits until something may have changed."""
        self._ask_due()
        due = [at for key, at in self._ask_at.items() if key not in self._asking]
        # With all places taken, the next end of a question wakes this.
        places = len(self._asking) < self._limits.asked_at_once
        timeout_s = max(0.0, min(due) - _now()) if due and places else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        self._wake.clear()

    def _ask_due(self) -> None:
        now, places = _now(), self._limits.asked_at_once - len(self._asking)
        if places <= 0:
            return
        due = ((at, key) for key, at in self._ask_at.items() if at <= now and key not in self._asking)
        # Who has waited longest comes first: leads that never answer keep nobody from being asked.
        for _, key in heapq.nsmallest(places, due):
            self._asking[key] = asyncio.create_task(self._ask(self._candidates[key]))

    async def _ask_all(self) -> None:
        """Asks all leads that are due, and waits for their answers as long as one question lasts."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.timeout_s):
                self._ask_due()
                while self._asking:
                    await asyncio.wait(self._asking.values(), return_when=asyncio.FIRST_COMPLETED)
                    self._ask_due()

    async def _ask(self, candidate: Candidate) -> None:
        wait_s = self._limits.retry_s
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                said = await self._introduce(candidate.address)
            said.to_json()
            if self._said.get(candidate.key) != said:
                self._said[candidate.key] = said
                self._changed.add(candidate.key)
            wait_s = self._limits.ask_every_s
        except (KVGrpcError, TimeoutError):
            pass
        finally:
            if self._asking.get(candidate.key) is asyncio.current_task():
                del self._asking[candidate.key]
                self._ask_at[candidate.key] = _now() + wait_s
                self._wake.set()

    def _listing(self) -> RegistryListing:
        self._changed |= self._candidates.keys() | self._values.keys()
        for _ in self._news():
            pass
        return RegistryListing(tuple((key, value, self._revision) for key, value in self._values.items()))

    def _news(self) -> Iterator[RegistryNews]:
        """Tells what has changed since it was last asked."""
        changed, self._changed = self._changed, set()
        for key in sorted(changed):
            value = self._value(key)
            if value == self._values.get(key):
                continue
            self._revision += 1
            if value is None:
                del self._values[key]
                yield EntryRemoved(key, self._revision)
            else:
                self._values[key] = value
                yield EntryChanged(key, value, self._revision)

    def _value(self, key: str) -> bytes | None:
        candidate, said = self._candidates.get(key), self._said.get(key)
        if candidate is None or said is None:
            return None
        try:
            return replace(
                said,
                addresses=(candidate.address,),
                life=said.life or self._lives.of(said.engine_id, said.incarnation),
                role=candidate.role or said.role,
                tenant=candidate.tenant or said.tenant,
                host=candidate.host or said.host,
                draining=candidate.draining or said.draining,
            ).to_json()
        except InvalidRequest:
            return None

    async def _stop(self, reading: asyncio.Task[None]) -> None:
        left: set[asyncio.Task[None]] = {reading, *self._asking.values()}
        self._asking.clear()
        while left:
            for task in left:
                task.cancel()
            # asyncio.wait_for of Python 3.11 loses a cancel that comes at the moment of its result.
            _, left = await asyncio.wait(left, timeout=CANCEL_S)
        if not reading.cancelled():
            reading.exception()  # a reader that went away hears of no break


def _now() -> float:
    return asyncio.get_running_loop().time()
