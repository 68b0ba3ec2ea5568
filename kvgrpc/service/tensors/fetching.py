"""Tensors that calls here wait for and that are kept elsewhere: their sources are asked for them.

What is wanted of a source while other tensors are on their way from it waits a moment, and is asked for together with
what else waits. What does not come so is asked for by itself.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from kvgrpc.core.tensors.bundles import BYTES_MAX, SHARE, Gathering
from kvgrpc.core.tensors.calls import Get, LeadAddress, Put
from kvgrpc.core.tensors.store import pages_for
from kvgrpc.errors import KVGrpcError
from kvgrpc.service.alarm import Alarm
from kvgrpc.service.tensors.delivery import fetch, fetch_together
from kvgrpc.service.tensors.life import Life
from kvgrpc.service.tensors.remote import RemoteStores


@dataclass(frozen=True)
class _Route:
    """What calls have in common whose tensors may be asked for together."""

    key: bytes
    source: LeadAddress
    request_id: str
    trace: str


@dataclass(eq=False)
class _Call:
    """A call that waits, and names a source."""

    number: int
    get: Get
    until: float
    route: _Route
    asking: bool = False
    """The source is being asked, or will be in a moment."""
    group: "set[_Call] | None" = None
    """Those that were asked for with it and still wait. It is asked for by itself from then on."""
    task: "asyncio.Task[None] | None" = None


@dataclass
class Fetching:
    """That of one life. `bring` begins to bring what a source gives, and raises what refuses it."""

    life: Life
    remote: RemoteStores
    bring: Callable[[Put, str], None]
    _calls: dict[int, _Call] = field(default_factory=dict)
    _gathering: Gathering[_Route, _Call] = field(default_factory=Gathering)

    def __post_init__(self) -> None:
        self._alarm = Alarm(self._due)
        self._most_pages = min(pages_for(BYTES_MAX, self.life.table.page_bytes), self.life.table.store_pages // SHARE)

    def add(self, number: int, get: Get, until: float, trace: str) -> None:
        """A call that waits until then: its source is asked, unless the tensor is on its way already."""
        assert get.source is not None, "it is fetched from somewhere"
        self._calls[number] = _Call(number, get, until, _Route(get.id.key, get.source, get.request_id, trace))
        self.begin(number)

    def begin(self, number: int) -> None:
        """Asks the source of this call, unless that is being asked, or the tensor is here or on its way."""
        call = self._calls.get(number)
        if call is None or call.asking or call.get.id in self.life.table.tensors:
            return
        call.asking = True
        if call.group is not None:
            self._ask(call)
        else:
            self._gathering.add(call.route, call, 0, self.life.now)
            self._look(call.route)

    def end(self, number: int) -> None:
        """The call waits no more."""
        call = self._calls.pop(number, None)
        if call is None:
            return
        self._gathering.discard(call.route, call)
        if call.task is not None:
            call.task.cancel()
        if call.group is not None:
            call.group.discard(call)
            if not call.group:
                self._gathering.ended(call.route)
                if not self.life.over:
                    self._look(call.route)

    def stop(self) -> None:
        """The life is over."""
        self._alarm.clear()

    def _due(self) -> None:
        if not self.life.over:
            for route in self._gathering.due(self.life.now):
                self._look(route)
            self._alarm.set(self._gathering.next_deadline())  # it may have rung early

    def _look(self, route: _Route) -> None:
        """Asks for those whose turn it is."""
        while calls := self._gathering.take(route, 0, self.life.now):
            group = set(calls)
            for call in calls:
                call.group = group
            if len(calls) == 1:
                self._ask(calls[0])
            else:
                self.life.spawn(self._ask_together(calls))
        self._alarm.set(self._gathering.next_deadline())

    def _ask(self, call: _Call) -> None:
        call.task = self.life.spawn(self._ask_alone(call))

    async def _ask_alone(self, call: _Call) -> None:
        """For as long as the call waits."""
        try:
            self.bring(
                await fetch(self.remote, call.get, call.until - self.life.now, call.route.trace), call.route.trace
            )
        except KVGrpcError as error:
            self.life.table.not_fetched(call.number, error.untraced())
        call.asking = False
        self.life.perform()

    async def _ask_together(self, calls: Sequence[_Call]) -> None:
        """For what is there by now of several tensors."""
        trace, gets = calls[0].route.trace, [call.get for call in calls]
        with suppress(KVGrpcError):  # whichever it is of, that one hears it when it is asked for by itself
            self.bring(await fetch_together(self.remote, gets, self._most_pages, trace), trace)
        for call in calls:
            call.asking = False
            self.begin(call.number)
        self.life.perform()
