"""The registry, read for callers while there are some: its entries, what is known of their engines, and pairs.

Reading costs a health check of each engine every few seconds, so it begins with the first caller and ends when nobody
has asked for a minute. `always` reads from the start, in a server that does nothing else.
"""

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial

import grpc.aio

from kvgrpc.config_fleet import FleetConfig
from kvgrpc.errors import InvalidRequest, Reason, Unavailable, Unimplemented
from kvgrpc.fleet.directory import Directory, DirectoryLimits
from kvgrpc.fleet.history import EngineHistory
from kvgrpc.fleet.pairing import NoPair, PairPicker, PairRequest, PickedPair
from kvgrpc.registry.following import DirectoryFollower
from kvgrpc.service.callers import payer
from kvgrpc.service.fleet.lead_checks import LeadChecks
from kvgrpc.service.fleet.offer_watches import OfferWatches
from kvgrpc.service.fleet.registries import registry_of

IDLE_S = 60.0
"""Time without a caller after which the registry is read no longer, in seconds."""
LISTING_S = 3.0
"""Time that the first callers wait for the registry's listing, in seconds."""
WARM_S = 3.0
"""Time after the listing within which a choice waits for the first health checks, in seconds."""
LOOK_S = 0.1
"""Longest time between two looks for changes, in seconds. The registry's news is looked at before."""
TOGETHER_S = 0.05
"""Time for which a look that found something is the last one, in seconds: changes within it are told together."""


class PickOutcome(StrEnum):
    """The result of a choice for one request."""

    PAIR = "pair"
    ALONE = "alone"
    """A decode engine that computes the whole request."""
    NONE = "none"


class FleetReading:
    """One span of reading: the directory and what is made of it. Revisions are its own."""

    def __init__(self, fleet: FleetConfig, checks: LeadChecks) -> None:
        """Raises InvalidRequest for a file of the settings that is not usable. The connections of `checks` end with the
        reading.
        """
        self._checks = checks
        registry = registry_of(fleet, checks.introduce)
        assert registry is not None  # checked by the reader
        self.directory = Directory(DirectoryLimits(check_every_s=float(fleet.check_every_s)))
        self.history = EngineHistory(self.directory)
        self.picker = PairPicker(self.history)
        self.offer_watches = OfferWatches(self.picker.offers, checks.channel_of) if fleet.watch_offers else None
        self.name = secrets.token_hex(8)
        """Name of these revisions: those of another server, or of an earlier reading, are others."""
        self.listed = asyncio.Event()
        self.listed_at = 0.0
        self.changed = asyncio.Event()
        """Set at each change, and replaced by another one."""
        self._told = 0
        """Revision of the last change."""
        self._heard = asyncio.Event()
        """Set when the registry has told something since the last look."""
        self._follower = DirectoryFollower(
            self.directory, registry, partial(checks.ask, self.directory), self._heard.set
        )
        self._follower.start()
        self._looking = asyncio.create_task(self._look_on())

    async def end(self) -> None:
        self._looking.cancel()
        await asyncio.gather(self._looking, return_exceptions=True)
        if self.offer_watches is not None:
            await self.offer_watches.end()
        await self._follower.stop()
        await self._checks.close()

    def look(self) -> None:
        """Notes what has changed by now, and wakes whoever waits for a change."""
        now = _now()
        if self.directory.complete and not self.listed.is_set():
            self.listed_at = now
            self.listed.set()
        self.history.look(now)
        changed, self._told = self.history.revision > self._told, self.history.revision  # a pick looks as well
        if self.offer_watches is not None and (self.offer_watches.idle(now) or changed):
            self.offer_watches.follow(self.history.by_key().values())
        if changed:
            self.changed.set()
            self.changed = asyncio.Event()

    def chain_asked(self, tenant: str) -> None:
        """Notes that a pair is asked for with a chain of a tenant: leads are asked for its offers from now on."""
        if self.offer_watches is not None and self.offer_watches.asked(tenant, payer(), _now()):
            self.offer_watches.follow(self.history.by_key().values())

    def silence_s(self) -> float:
        """Returns how long the registry has been silent, in seconds; 0 while it answers."""
        return self.directory.stale_s(_now()) or 0.0

    async def _look_on(self) -> None:
        while True:
            told, before = self._heard.is_set(), self.history.revision
            self._heard.clear()
            self.look()
            if told or self.history.revision > before:
                await asyncio.sleep(TOGETHER_S)
                continue
            with contextlib.suppress(TimeoutError):  # what a check or the time has changed is seen at the next look
                async with asyncio.timeout(LOOK_S):
                    await self._heard.wait()


class FleetReader:
    """Reads the registry of the settings on demand, until `stop`."""

    def __init__(
        self,
        fleet: FleetConfig,
        connect: Callable[[str, str], grpc.aio.Channel],
        may_dial: Callable[[str], bool],
        *,
        always: bool = False,
    ) -> None:
        self._fleet, self._always = fleet, always
        self._connect, self._may_dial = connect, may_dial
        self._present: FleetReading | None = None
        self._watchers = 0
        self._used_at = 0.0
        self._idle: asyncio.Task[None] | None = None
        self.picks: Counter[PickOutcome] = Counter()
        """Number of choices for requests. The services that make them count them."""

    @property
    def present(self) -> FleetReading | None:
        """The reading that goes on; None: nobody has asked lately."""
        return self._present

    async def reading(self) -> FleetReading:
        """Returns the reading, with a listing, as of now. Raises Unimplemented if there is no registry, Unavailable
        (PEER_UNREACHABLE) if it has not answered yet.
        """
        if not self._fleet.registry:
            raise Unimplemented(Reason.FEATURE_UNAVAILABLE, "this server has no registry: set fleet.registry")
        try:
            reading = self.begin()
        except InvalidRequest as error:
            what = f"the registry {self._fleet.registry} cannot be read: {error}"
            raise Unavailable(Reason.PEER_UNREACHABLE, what, retry_delay_s=1.0) from error
        try:
            async with asyncio.timeout(LISTING_S):
                await reading.listed.wait()
        except TimeoutError:
            what = f"the registry {self._fleet.registry} has not answered yet"
            raise Unavailable(Reason.PEER_UNREACHABLE, what, retry_delay_s=1.0) from None
        reading.look()
        return reading

    def begin(self) -> FleetReading:
        """Begins to read, unless it goes on already, and returns the reading. Raises InvalidRequest for a file of the
        settings that is not usable.
        """
        self._used_at = _now()
        if self._present is None:
            self._present = FleetReading(self._fleet, self._checks())
            if not self._always:
                self._idle = asyncio.create_task(self._end_when_idle())
        return self._present

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keeps the reading going inside the context."""
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1
            self._used_at = _now()

    async def pick_pair(self, request: PairRequest) -> tuple[FleetReading, PickedPair | NoPair]:
        """Returns the reading and the chosen pair. Raises as `reading`."""
        reading = await self.reading()
        if request.chain:
            reading.chain_asked(request.tenant)
        found = reading.picker.pick_pair(request, _now())
        while isinstance(found, NoPair) and _now() - reading.listed_at < WARM_S:
            try:
                async with asyncio.timeout(WARM_S):
                    await reading.changed.wait()
            except TimeoutError:
                break
            found = reading.picker.pick_pair(request, _now())
        if isinstance(found, PickedPair) and request.chain:
            for one in (found.prefill, found.decode):
                reading.picker.prefixes.add(one.entry.engine_id, request.chain)
        return reading, found

    async def stop(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            await asyncio.gather(self._idle, return_exceptions=True)
        await self._end()

    def _checks(self) -> LeadChecks:
        return LeadChecks(self._connect, self._may_dial, self._fleet.certificate_name)

    async def _end(self) -> None:
        reading, self._present = self._present, None
        if reading is not None:
            await reading.end()

    async def _end_when_idle(self) -> None:
        while True:
            left = IDLE_S if self._watchers else self._used_at + IDLE_S - _now()
            if left <= 0:
                break
            await asyncio.sleep(left)
        self._idle = None
        await self._end()


def _now() -> float:
    return asyncio.get_running_loop().time()
