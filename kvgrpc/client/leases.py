"""Keeps leases alive: renews them in time, in batches, and tells a lease's holder when it is over.

Rules:
* A lease is renewed when a third of its remaining time has passed, so that two renewals may fail.
* The remaining time counts from the moment a renewal was sent, by this process's monotonic clock, so that the holder
  never believes in a lease longer than its server does.
* The end is final and has a reason. A lease that could not be renewed in time counts as expired, even if its server
  still holds it: in doubt, the holder must not rely on it.
"""

import asyncio
import contextvars
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from kvgrpc.client.renewal_stream import RenewalStream
from kvgrpc.client.values import in_seconds, reason_of
from kvgrpc.errors import Aborted, KVGrpcError, NotFound, PreconditionFailed, Reason
from kvgrpc.v1.common_pb2 import Grant
from kvgrpc.v1.lease_pb2 import LEASE_STATE_EXPIRED, LEASE_STATE_LIVE, LeaseRef, LeaseState, RenewedLease

TOGETHER_S = 0.25
"""Window in seconds: renewals due this soon go along with one that is due now."""
PAUSE_MIN_S = 0.1
"""Minimum time between two renewals of a lease, in seconds, also if its cap leaves little time."""
PAUSE_AFTER_FAILURE_S = 1.0
TIMEOUT_S = 10.0
BATCH_MAX = 5_000
"""Maximum number of leases in one message. A server takes 10,000, but at most 4 MB, and a grant has up to 700 bytes."""

_ENDED: dict[Reason, type[KVGrpcError]] = {Reason.LEASE_NOT_FOUND: NotFound, Reason.INCARNATION_CHANGED: Aborted}


@dataclass(eq=False)
class KnownLease:
    """The known state of one lease. It is pure: every clock reading is an argument."""

    ref: LeaseRef
    lease_id: str
    left_until: float = 0.0
    due: float = 0.0
    """Time of the next renewal."""
    error: KVGrpcError | None = None
    """Why the lease is over; None while it lives."""
    state: LeaseState.ValueType = LEASE_STATE_LIVE
    """The state that the server named last."""
    on_end: Callable[[], None] = lambda: None
    _failure: KVGrpcError | None = None

    def granted(self, left_s: float, sent: float) -> None:
        """Records that `left_s` was left, counted from `sent`."""
        self.left_until = sent + left_s
        self.due = sent + max(left_s / 3, PAUSE_MIN_S)
        self._failure = None

    def answered(self, row: RenewedLease, sent: float) -> None:
        """Records the server's answer to a renewal sent at `sent`."""
        left_s = in_seconds(row.remaining)
        self.state = row.state or self.state
        if not row.reason and left_s > 0:
            self.granted(left_s, sent)
            return
        reason = reason_of(row.reason) if row.reason else Reason.LEASE_EXPIRED
        kind = _ENDED.get(reason, PreconditionFailed)
        self.end(kind(reason, f"lease {self.lease_id} is over and could not be renewed"))

    def not_answered(self, why: KVGrpcError, now: float) -> None:
        """Records a failed renewal, and schedules the next attempt within the time left."""
        self._failure = why
        pause_s = max(min((self.left_until - now) / 4, PAUSE_AFTER_FAILURE_S), PAUSE_MIN_S)
        self.due = min(now + max(pause_s, why.retry_delay_s or 0.0), self.left_until)

    def overdue(self, now: float) -> KVGrpcError | None:
        """Returns why the lease is over at `now`, or None."""
        if self.error is None and now >= self.left_until:
            last = f"; the last attempt: {self._failure}" if self._failure else ""
            error = PreconditionFailed(
                Reason.LEASE_EXPIRED, f"lease {self.lease_id} could not be renewed in time{last}"
            )
            error.__cause__ = self._failure
            return error
        return self.error

    def end(self, error: KVGrpcError) -> None:
        """Ends the lease. Only the first end counts."""
        if self.error is None:
            self.error = error
            self.on_end()


class HeldLease:
    """A lease that is kept alive."""

    def __init__(self, renewal: KnownLease, grant: Grant | None) -> None:
        self.lease_id = renewal.lease_id
        self.grant = grant
        """Grant for consumers to pull with; None for a lease that was named by its id."""
        self._renewal = renewal
        self._over = asyncio.Event()
        renewal.on_end = self._over.set

    @property
    def reason(self) -> Reason | None:
        """Why the lease is over; None while it lives. LEASE_RELEASED can also mean that its consumers are done: see
        `state`.
        """
        error = self._renewal.overdue(time.monotonic())
        return error.reason if error else None

    @property
    def state(self) -> LeaseState.ValueType:
        """The state that the server named last; DONE means that the consumers have their KV. EXPIRED also if the lease
        could not be renewed in time, whatever the server may know.
        """
        error = self._renewal.overdue(time.monotonic())
        if error and error.reason is Reason.LEASE_EXPIRED and self._renewal.state == LEASE_STATE_LIVE:
            return LEASE_STATE_EXPIRED
        return self._renewal.state

    def check(self) -> None:
        """Raises the error that says why the lease is over, if it is."""
        error = self._renewal.overdue(time.monotonic())
        if error:
            raise error

    async def wait_over(self) -> Reason:
        """Returns when the lease is over, with the reason."""
        await self._over.wait()
        assert self._renewal.error is not None
        return self._renewal.error.reason


class Keeper:
    """Renews the leases of one client, in one task that lives only while a lease is held."""

    def __init__(self, renewals: RenewalStream) -> None:
        self._renewals = renewals
        self._held: set[KnownLease] = set()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def holding(
        self, renewal: KnownLease, grant: Grant | None, release: Callable[[], Awaitable[None]] | None
    ) -> AsyncIterator[HeldLease]:
        """Renews a lease during the `async with`, then releases it unless it is over. A failed release never hides an
        error of the body. Without such an error it is raised: the blocks stay pinned until the lease expires.
        """
        held = HeldLease(renewal, grant)
        self._hold(renewal)
        try:
            yield held
        except BaseException as error:
            self._drop(renewal)
            try:
                await _release(renewal, release)
            except KVGrpcError as failed:
                error.add_note(f"lease {renewal.lease_id} could not be released, it ends by itself: {failed}")
            raise
        self._drop(renewal)
        await _release(renewal, release)

    async def close(self) -> None:
        """Stops renewing. Raises an unexpected error of the task."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._renewals.close()

    def _hold(self, renewal: KnownLease) -> None:
        self._held.add(renewal)
        self._news.set()
        if self._task is None or self._task.done():
            # Empty context: the first caller's span must not be the trace of all later renewals.
            self._task = asyncio.get_running_loop().create_task(
                self._run(), name="kvgrpc lease renewals", context=contextvars.Context()
            )

    def _drop(self, renewal: KnownLease) -> None:
        self._held.discard(renewal)
        self._news.set()

    async def _run(self) -> None:
        try:
            while self._held:
                now = time.monotonic()
                for renewal in list(self._held):
                    error = renewal.overdue(now)
                    if error:
                        renewal.end(error)
                        self._held.discard(renewal)
                soon = sorted((r for r in self._held if r.due <= now + TOGETHER_S), key=lambda r: r.due)
                if soon and soon[0].due <= now:
                    await self._renew(soon[:BATCH_MAX])
                elif self._held:
                    await self._pause(min(renewal.due for renewal in self._held) - now)
        finally:
            # Also if this task fails: no holder may believe in a lease that is not renewed.
            for renewal in self._held:
                renewal.end(PreconditionFailed(Reason.LEASE_EXPIRED, f"lease {renewal.lease_id} is no longer renewed"))

    async def _pause(self, longest_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                await self._news.wait()
        self._news.clear()

    async def _renew(self, renewals: Sequence[KnownLease]) -> None:
        sent = time.monotonic()
        soonest = min(renewal.left_until for renewal in renewals)
        timeout_s = min(max((soonest - sent) / 2, PAUSE_MIN_S), TIMEOUT_S)
        try:
            rows = await self._renewals.renew([renewal.ref for renewal in renewals], timeout_s)
        except KVGrpcError as error:
            for renewal in renewals:
                renewal.not_answered(error, time.monotonic())
            return
        for renewal, row in zip(renewals, rows, strict=True):
            renewal.answered(row, sent)


async def _release(renewal: KnownLease, release: Callable[[], Awaitable[None]] | None) -> None:
    if release is not None and renewal.error is None:
        await release()
