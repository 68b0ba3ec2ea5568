"""Fetches of tensors that calls here wait for and that are kept elsewhere: their sources are asked for them.

While tensors of a source are on their way, others wanted of it wait a moment and are asked for together. A tensor that
does not come this way is asked for by itself.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import field

from kvgrpc.core.tensors.bundles import BYTES_MAX, SHARE, BundleQueue
from kvgrpc.core.tensors.descriptions import Get, LeadAddress, Put
from kvgrpc.core.tensors.store_layout import pages_for
from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import KVGrpcError
from kvgrpc.service.runner import Alarm
from kvgrpc.service.tensors.delivery import RemoteStores, fetch, fetch_together
from kvgrpc.service.tensors.life import Life


@dataclass(frozen=True)
class _FetchRoute:
    """The values that calls must share for their tensors to be asked for together."""

    key: bytes
    source: LeadAddress
    request_id: str
    trace: str
    tenant: str


@dataclass(eq=False)
class _FetchCall:
    """A waiting call that names a source."""

    number: int
    get: Get
    until: float
    route: _FetchRoute
    asking: bool = False
    """True while the source is being asked, or will be in a moment."""
    group: "set[_FetchCall] | None" = None
    """Calls asked for together with this one that still wait. From then on each is asked for by itself."""
    task: "asyncio.Task[None] | None" = None


@dataclass
class SourceFetcher:
    """The fetches of one life. `bring` begins to bring what a source gives, and raises a refusal."""

    life: Life
    remote: RemoteStores
    bring: Callable[[Put, str], None]
    _calls: dict[int, _FetchCall] = field(default_factory=dict)
    _bundles: BundleQueue[_FetchRoute, _FetchCall] = field(default_factory=BundleQueue)

    def __post_init__(self) -> None:
        self._alarm = Alarm(self._due)
        self._most_pages = min(pages_for(BYTES_MAX, self.life.table.page_bytes), self.life.table.store_pages // SHARE)

    def add(self, number: int, get: Get, until: float, trace: str) -> None:
        """Adds a call that waits until `until`. Its source is asked, unless the tensor is on its way already."""
        assert get.source is not None, "it is fetched from somewhere"
        route = _FetchRoute(get.id.key, get.source, get.request_id, trace, get.tenant)
        self._calls[number] = _FetchCall(number, get, until, route)
        self.begin(number)

    def begin(self, number: int) -> None:
        """Asks the source of this call, unless it is being asked, or the tensor is here or on its way."""
        call = self._calls.get(number)
        if call is None or call.asking or call.get.id in self.life.table.tensors:
            return
        call.asking = True
        if call.group is not None:
            self._ask(call)
        else:
            self._bundles.add(call.route, call, 0, self.life.time())
            self._look(call.route)

    def end(self, number: int) -> None:
        """Removes a call that waits no more."""
        call = self._calls.pop(number, None)
        if call is None:
            return
        self._bundles.discard(call.route, call)
        if call.task is not None:
            call.task.cancel()
        if call.group is not None:
            call.group.discard(call)
            if not call.group:
                self._bundles.ended(call.route)
                if not self.life.over:
                    self._look(call.route)

    def stop(self) -> None:
        """Ends the fetches: the life is over."""
        self._alarm.clear()

    def _due(self) -> None:
        if not self.life.over:
            for route in self._bundles.due(self.life.time()):
                self._look(route)
            self._alarm.set(self._bundles.next_deadline())  # the alarm may have rung early

    def _look(self, route: _FetchRoute) -> None:
        """Asks the route's source for the tensors whose turn it is."""
        while calls := self._bundles.take(route, 0, self.life.time()):
            group = set(calls)
            for call in calls:
                call.group = group
            if len(calls) == 1:
                self._ask(calls[0])
            else:
                self.life.spawn(self._ask_together(calls))
        self._alarm.set(self._bundles.next_deadline())

    def _ask(self, call: _FetchCall) -> None:
        call.task = self.life.spawn(self._ask_alone(call))

    async def _ask_alone(self, call: _FetchCall) -> None:
        """Asks the source for the call's tensor, for as long as the call waits."""
        try:
            self.bring(
                await fetch(self.remote, call.get, call.until - self.life.time(), call.route.trace), call.route.trace
            )
        except KVGrpcError as error:
            self.life.table.not_fetched(call.number, error.untraced())
        call.asking = False
        self.life.perform()

    async def _ask_together(self, calls: Sequence[_FetchCall]) -> None:
        """Asks the source for those of several tensors that it has by now."""
        trace, gets = calls[0].route.trace, [call.get for call in calls]
        with suppress(KVGrpcError):  # each call hears its error when its tensor is asked for by itself
            self.bring(await fetch_together(self.remote, gets, self._most_pages, trace), trace)
        for call in calls:
            call.asking = False
            self.begin(call.number)
        self.life.perform()
