"""Watches of what leads offer, for the choice of pairs: WatchOffers at each healthy lead, into the index of offers.

They cost a stream to each lead. So they begin when a pair is asked for with a chain, and end when none was for a
minute. A watch is all of a lead's offers first, then what changes; after a break it goes on where it was. A lead is
heard at a bounded rate, and what it tells takes no more than its share of the index.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import grpc
import grpc.aio

from kvgrpc.fleet.directory import EngineState
from kvgrpc.fleet.history import EngineRow
from kvgrpc.fleet.offered import OfferBook, OfferedPrefixes
from kvgrpc.v1 import lease_pb2, lease_pb2_grpc

_log = logging.getLogger(__name__)
IDLE_S = 60.0
"""Time without a chain of a tenant after which leads are no longer asked for its offers, in seconds."""
TENANTS_MAX = 8
"""Maximum number of tenants whose offers are heard at a time. The chains of further ones wait for an idle one, or for
one of a caller with more of them.
"""
WATCHES_MAX = 4_096
"""Maximum number of watches."""
SILENCE_S = 15.0
"""Silence after which a watch begins anew, in seconds: three times the longest gap that a lead leaves."""
PAUSE_MIN_S, PAUSE_MAX_S = 0.5, 30.0
"""First and longest pause before a watch that broke begins anew, in seconds."""
REFUSED_S = 60.0
"""Pause after an answer that another try does not change, in seconds."""
APART_S = 0.05
"""Time between two messages of one lead that are heard, in seconds."""
ROW_S = 10e-6
"""Time for which each row of the index that a message changes keeps all others waiting, in seconds: several times what
it costs.
"""
ROWS_AT_ONCE = 500
"""Number of rows that are changed before others have the event loop."""
CHANGES_MAX = 16_384
"""Maximum number of changes in one message. Leads send fewer."""
DIGESTS_BYTES_MAX = 512 * 1024
"""Maximum size of all digests in one message, in bytes. Leads send half of that."""
_FINAL = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
_Life = tuple[str, int, str]
ChannelOf = Callable[[EngineRow], grpc.aio.Channel | None]
"""Returns the connection to the lead of an entry; None: there is none now."""


class OfferWatches:
    """Watches for one reading of the registry, until `end`."""

    def __init__(self, offers: OfferedPrefixes, channel_of: ChannelOf) -> None:
        self._offers, self._channel_of = offers, channel_of
        self._asked: dict[str, tuple[str, float]] = {}
        """The caller that came first with each tenant whose offers are heard, and the time of its last chain."""
        self._watches: dict[tuple[str, str], tuple[_Life, asyncio.Task[None]]] = {}
        """Watches by tenant and key of the entry."""
        self._ended: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        """Held while the changes of one lead are taken."""
        self._said = self._over = False

    @property
    def count(self) -> int:
        """Number of leads that are watched, once for each tenant."""
        return len(self._watches)

    def asked(self, tenant: str, caller: str, now: float) -> bool:
        """Notes that a caller asks for a pair with a chain of a tenant. Returns whether that is new: call `follow`
        then.
        """
        new = tenant not in self._asked
        if self._over or (new and not self._has_room(caller)):
            return False
        self._asked[tenant] = caller if new else self._asked[tenant][0], now
        return new

    def _has_room(self, caller: str) -> bool:
        """Returns whether there is room for one more tenant of a caller. The caller with the most tenants makes room
        for one that has fewer even then: it may have invented them.
        """
        if len(self._asked) < TENANTS_MAX:
            return True
        held = Counter(of for of, _ in self._asked.values())
        ((most, count),) = held.most_common(1)
        if held[caller] + 1 >= count:
            return False
        del self._asked[min((at, tenant) for tenant, (of, at) in self._asked.items() if of == most)[1]]
        return True

    def idle(self, now: float) -> bool:
        """Forgets tenants that have no chains any more. Returns whether there was one: call `follow` then."""
        idle = [tenant for tenant, (_, at) in self._asked.items() if now - at > IDLE_S]
        for tenant in idle:
            del self._asked[tenant]
        return bool(idle)

    def follow(self, rows: Iterable[EngineRow]) -> None:
        """Watches the healthy leads of these rows, and no others."""
        if not self._asked and not self._watches:
            return
        wanted = {
            (tenant, row.key): row
            for row in rows
            if row.state is EngineState.HEALTHY
            for tenant in self._asked
            if row.entry.tenant in ("", tenant)
        }
        for of, (life, task) in list(self._watches.items()):
            if of not in wanted or _life(wanted[of]) != life:
                del self._watches[of]
                self._end(task)
        for of, row in wanted.items():
            if of not in self._watches and len(self._watches) < WATCHES_MAX:
                self._watches[of] = _life(row), asyncio.create_task(self._watch(of[0], row))

    async def end(self) -> None:
        """Ends all watches. None begins any more."""
        self._over = True
        self._asked.clear()
        for _, task in self._watches.values():
            self._end(task)
        self._watches.clear()
        for task in self._ended:
            task.cancel()  # also what is forgotten slowly: now the whole index goes
        await asyncio.gather(*self._ended, return_exceptions=True)

    def _end(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        self._ended.add(task)
        task.add_done_callback(self._ended.discard)

    async def _watch(self, tenant: str, row: EngineRow) -> None:
        told = _Told(self._offers.book(row.entry.engine_id, tenant), row)
        pause_s = PAUSE_MIN_S
        try:
            while True:
                channel, before, refused = self._channel_of(row), told.message_count, ""
                if channel is not None:
                    refused = await self._hear(channel, tenant, told)
                if told.message_count > before:
                    pause_s = PAUSE_MIN_S
                if refused:
                    await self._forget(told)
                    self._say(row, refused)
                await asyncio.sleep(REFUSED_S if refused else pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
        finally:
            await self._forget(told)

    async def _forget(self, told: "_Told") -> None:
        """Forgets what a lead has told, as slowly as it is taken. At the end the whole index goes."""
        async with self._turn:
            if not self._over:
                await told.start_over()

    async def _hear(self, channel: grpc.aio.Channel, tenant: str, told: "_Told") -> str:
        """Takes what a lead tells until the stream breaks. Returns why another try changes nothing; empty: it may."""
        request = lease_pb2.WatchOffersRequest(
            tenant=tenant, after_offer_seq=told.seq, incarnation=told.life if told.seq else 0
        )  # fmt: skip
        call = None
        try:
            call = lease_pb2_grpc.LeaseServiceStub(channel).WatchOffers(request)
            replies = aiter(call)
            while True:
                async with asyncio.timeout(SILENCE_S):
                    reply = await anext(replies, None)
                if reply is None:
                    return ""
                if wrong := told.wrong(reply):
                    return wrong
                async with self._turn:
                    await told.take(reply)
                await asyncio.sleep(APART_S)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name} {error.details()}" if error.code() in _FINAL else ""
        except (grpc.aio.UsageError, TimeoutError):
            return ""
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return ""  # the connection was closed
        finally:
            if call is not None:
                with suppress(grpc.aio.UsageError):
                    call.cancel()

    def _say(self, row: EngineRow, why: str) -> None:
        """Logs why the offers of a lead are not heard: once, because all leads may say the same."""
        if not self._said:
            self._said = True
            engine, address = row.entry.engine_id, row.entry.addresses[0]
            _log.warning("offers of engine %s at %s are not heard (others are not logged): %s", engine, address, why)


def _life(row: EngineRow) -> _Life:
    """Returns what a watch is of, beside the key: another engine, life or address is watched anew."""
    return row.entry.engine_id, row.entry.incarnation, row.entry.addresses[0]


class _Told:
    """Offers that one lead has told, as far as they count."""

    def __init__(self, book: OfferBook, row: EngineRow) -> None:
        self._book, self._entry = book, row.entry
        self.life = 0
        """Incarnation that the offers are of; 0: none was told."""
        self.seq = 0
        """Number to resume after."""
        self.message_count = 0

    def wrong(self, reply: lease_pb2.WatchOffersResponse) -> str:
        """Returns what is wrong with a message; empty: nothing."""
        there = reply.header
        if there.engine_id != self._entry.engine_id or self._entry.incarnation not in (0, there.incarnation):
            return "another engine answers"
        if not reply.snapshot and there.incarnation != self.life:
            return "a new life does not begin with a snapshot"
        if len(reply.changes) > CHANGES_MAX:
            return f"a message has more than {CHANGES_MAX} changes"
        if sum(len(change.digests) for change in reply.changes) > DIGESTS_BYTES_MAX:
            return f"a message has more than {DIGESTS_BYTES_MAX} bytes of digests"
        return ""

    async def take(self, reply: lease_pb2.WatchOffersResponse) -> None:
        """Takes a message that is not wrong, with a pause after some rows and at the end."""
        await _pace(self._changed(reply))
        self.life, self.seq = reply.header.incarnation, reply.offer_seq
        self.message_count += 1

    def _changed(self, reply: lease_pb2.WatchOffersResponse) -> Iterator[int]:
        """Takes the changes one by one, and yields the number of rows that each has changed."""
        if reply.snapshot:
            yield from self._book.forget()
        for change in reply.changes:
            if change.ended:
                yield 1 + self._book.ended(change.offer_number)
            else:
                yield self._book.began(change.offer_number, change.digests)

    async def start_over(self) -> None:
        """Forgets everything, with the same pauses."""
        self.life = self.seq = 0
        await _pace(self._book.forget())


async def _pace(changed: Iterable[int]) -> None:
    """Makes changes of some rows each, with a pause after some rows and at the end."""
    done = 0
    for rows in changed:
        done += rows
        if done >= ROWS_AT_ONCE:
            await asyncio.sleep(done * ROW_S)
            done = 0
    await asyncio.sleep(done * ROW_S)
