"""Leases that are kept alive: renewed in time, all in one batch, and whoever holds one learns when it is over.

Rules:
* A lease is renewed when a third of what was left has passed, so that two renewals may fail.
* What is left is counted from the moment a renewal was sent, by this process's own monotonic clock: the holder never
  believes in a lease longer than its server does.
* The end is final and has a reason. A lease that could not be renewed in time counts as expired, whatever the server
  may know: on doubt the holder must not rely on it.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from kvgrpc.client.renewals import Renewals
from kvgrpc.errors import Aborted, KVGrpcError, NotFound, PreconditionFailed, Reason
from kvgrpc.v1.common_pb2 import FailureReason, Grant
from kvgrpc.v1.lease_pb2 import LeaseRef, RenewedLease
from kvgrpc.client.values import in_seconds

TOGETHER_S = 0.25
"""Renewals that are due this soon go along with one that is due now."""
PAUSE_MIN_S = 0.1
"""Between two renewals of a lease, also when its cap leaves it little time."""
PAUSE_AFTER_FAILURE_S = 1.0
TIMEOUT_S = 10.0

_ENDED: dict[Reason, type[KVGrpcError]] = {
    Reason.LEASE_NOT_FOUND: NotFound,
    Reason.INCARNATION_CHANGED: Aborted,
}


class HeldLease:
    """A lease that is kept alive."""

    def __init__(self, ref: LeaseRef, lease_id: str, grant: Grant | None, left_until: float) -> None:
        self.ref = ref
        self.lease_id = lease_id
        self.grant = grant
        """What a consumer pulls with; None if the lease was taken over by its id."""
        self.error: KVGrpcError | None = None
        """Why it is over; None while it lives."""
        self.left_until = left_until
        self.due = 0.0
        self._over = asyncio.Event()

    @property
    def reason(self) -> Reason | None:
        """Why it is over; None while it lives. LEASE_RELEASED also means that its consumers are done."""
        return self.error.reason if self.error else None

    def check(self) -> None:
        """Raises the error that says why the lease is over, if it is."""
        if self.error is not None:
            raise self.error

    async def wait_over(self) -> Reason:
        """Returns when the lease is over, with the reason."""
        await self._over.wait()
        assert self.error is not None
        return self.error.reason

    def renewed(self, row: RenewedLease, sent: float) -> None:
        """What the server answered to a renewal sent at `sent`."""
        left_s = in_seconds(row.remaining)
        if row.reason or left_s <= 0:
            reason = _reason(row.reason) if row.reason else Reason.LEASE_EXPIRED
            kind = _ENDED.get(reason, PreconditionFailed)
            self.end(kind(reason, f"lease {self.lease_id} could not be renewed: it is over"))
            return
        self.left_until = sent + left_s
        self.due = sent + max(left_s / 3, PAUSE_MIN_S)

    def not_renewed(self, why: KVGrpcError, now: float) -> None:
        """A renewal got no answer: again soon, as long as there is time."""
        if now >= self.left_until:
            self.end(_too_late(self.lease_id, why))
            return
        pause_s = max(min((self.left_until - now) / 4, PAUSE_AFTER_FAILURE_S), PAUSE_MIN_S)
        self.due = min(now + max(pause_s, why.retry_delay_s or 0.0), self.left_until)

    def end(self, error: KVGrpcError) -> None:
        """It is over. Only the first end counts."""
        if self.error is None:
            self.error = error
            self._over.set()


class Keeper:
    """Renews the leases of one client: one task, which lives only while a lease is held."""

    def __init__(self, renewals: Renewals) -> None:
        self._renewals = renewals
        self._held: set[HeldLease] = set()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def hold(self, lease: HeldLease) -> None:
        """From now on `lease` is renewed."""
        self._held.add(lease)
        self._news.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="kvgrpc lease renewals")

    def drop(self, lease: HeldLease) -> None:
        """From now on it is not."""
        self._held.discard(lease)
        self._news.set()

    async def close(self) -> None:
        """Stops renewing. An error of the task that nobody expected is raised here."""
        self._held.clear()
        self._news.set()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._renewals.close()

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        try:
            while self._held:
                pause_s = min(lease.due for lease in self._held) - clock()
                if pause_s > 0:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(pause_s):
                            await self._news.wait()
                    self._news.clear()
                    continue
                await self._renew([lease for lease in self._held if lease.due <= clock() + TOGETHER_S])
                self._held = {lease for lease in self._held if lease.error is None}
        finally:
            # Also when this task fails: nobody shall believe in a lease that nobody renews.
            for lease in self._held:
                lease.end(PreconditionFailed(Reason.LEASE_EXPIRED, f"lease {lease.lease_id} is no longer renewed"))

    async def _renew(self, leases: Sequence[HeldLease]) -> None:
        sent = asyncio.get_running_loop().time()
        soonest = min(lease.left_until for lease in leases)
        timeout_s = min(max((soonest - sent) / 2, PAUSE_MIN_S), TIMEOUT_S)
        try:
            rows = await self._renewals.renew([lease.ref for lease in leases], timeout_s)
        except KVGrpcError as error:
            for lease in leases:
                lease.not_renewed(error, asyncio.get_running_loop().time())
            return
        for lease, row in zip(leases, rows, strict=True):
            lease.renewed(row, sent)


def _reason(value: FailureReason.ValueType) -> Reason:
    """A reason that this version does not know reads as INTERNAL."""
    name = FailureReason.Name(value).removeprefix("FAILURE_REASON_") if value in FailureReason.values() else ""
    return Reason[name] if name in Reason.__members__ else Reason.INTERNAL


def _too_late(lease_id: str, why: KVGrpcError) -> KVGrpcError:
    error = PreconditionFailed(
        Reason.LEASE_EXPIRED, f"lease {lease_id} could not be renewed in time; the last attempt: {why}"
    )
    error.__cause__ = why
    return error
