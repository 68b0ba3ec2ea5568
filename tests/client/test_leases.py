"""A held lease is renewed in time, with all leases of a client in one batch, and its holder learns of its end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext

from kvgrpc.client import Client, connect, leases
from kvgrpc.client.leases import KnownLease
from kvgrpc.client.values import duration
from kvgrpc.errors import Aborted, Exhausted, NotFound, PreconditionFailed, Reason, Unavailable
from kvgrpc.v1.common_pb2 import (
    FAILURE_REASON_INCARNATION_CHANGED,
    FAILURE_REASON_LEASE_EXPIRED,
    FAILURE_REASON_LEASE_NOT_FOUND,
    FailureReason,
    Grant,
)
from kvgrpc.v1.lease_pb2 import (
    LEASE_STATE_EXPIRED,
    LEASE_STATE_LIVE,
    GrantLeaseResponse,
    KeepAliveResponse,
    Lease,
    LeaseRef,
    ReleaseLeaseResponse,
    RenewedLease,
    RenewLeasesResponse,
)
from tests.client.fake import FakeServer, fail, failing

UNTIL_S = 20
MISSING = RenewedLease(reason=FAILURE_REASON_LEASE_NOT_FOUND)


@dataclass
class Ledger:
    """The leases of a fake server, and the renewals that it received."""

    server: FakeServer
    ttl_s: float = 1.2
    """TTL of the leases, in seconds. No busy machine loses a lease with it; tests of lease ends set less."""
    reason: FailureReason.ValueType = 0  # type: ignore[assignment]
    """The reason with which every renewal is refused, or 0."""
    renewed: asyncio.Queue[list[str]] = field(default_factory=asyncio.Queue)
    """Lease ids of each renewal batch."""
    over: list[str] = field(default_factory=list)
    """The way each batch came: "stream" or "unary"."""
    streams: int = 0

    def serve(self, *, stream: bool = True) -> None:
        self.server.answers["GrantLease"] = self.grant
        self.server.answers["RenewLeases"] = self.renew
        self.server.answers["ReleaseLease"] = lambda request, context: ReleaseLeaseResponse()
        self.server.answers["KeepAlive"] = self.keep_alive if stream else self.unimplemented

    def grant(self, request: Any, context: Any) -> GrantLeaseResponse:
        lease = Lease(lease_id=f"l-{request.request_id}", remaining=duration(self.ttl_s))
        return GrantLeaseResponse(lease=lease, grant=Grant(token=b"t"))

    def rows(self, request: Any, way: str) -> list[RenewedLease]:
        self.over.append(way)
        self.renewed.put_nowait([ref.lease_id or ref.grant.lease_id for ref in request.leases])
        if self.reason:
            return [RenewedLease(reason=self.reason) for _ in request.leases]
        return [RenewedLease(remaining=duration(self.ttl_s)) for _ in request.leases]

    def renew(self, request: Any, context: Any) -> RenewLeasesResponse:
        return RenewLeasesResponse(leases=self.rows(request, "unary"))

    async def keep_alive(self, requests: Any, context: Any) -> AsyncIterator[KeepAliveResponse]:
        self.streams += 1
        async for request in requests:
            yield KeepAliveResponse(leases=self.rows(request, "stream"))

    async def unimplemented(self, requests: Any, context: Any) -> AsyncIterator[KeepAliveResponse]:
        await fail(context, grpc.StatusCode.UNIMPLEMENTED, "FEATURE_UNAVAILABLE")
        yield KeepAliveResponse()

    async def batches(self, count: int) -> list[list[str]]:
        async with asyncio.timeout(UNTIL_S):
            return [await self.renewed.get() for _ in range(count)]

    @property
    def released(self) -> list[str]:
        return [request.lease.lease_id for request in self.server.requests("ReleaseLease")]


@pytest.fixture
def ledger(server: FakeServer) -> Ledger:
    made = Ledger(server)
    made.serve()
    return made


# ---- one lease, without a server


def renewal(left_s: float = 30.0) -> KnownLease:
    made = KnownLease(LeaseRef(lease_id="l"), "l")
    made.granted(left_s, sent=100.0)
    return made


def test_a_lease_is_renewed_when_a_third_of_what_is_left_has_passed() -> None:
    lease = renewal(30.0)
    assert lease.due == 110.0
    lease.answered(RenewedLease(remaining=duration(12.0)), sent=110.0)
    assert (lease.left_until, lease.due) == (122.0, 114.0)


def test_what_is_left_counts_from_the_sending_of_the_renewal() -> None:
    lease = renewal(30.0)
    lease.answered(RenewedLease(remaining=duration(30.0)), sent=115.0)
    assert lease.overdue(144.9) is None
    assert lease.overdue(145.0) is not None


def test_a_lease_at_its_cap_is_not_renewed_in_a_busy_loop() -> None:
    lease = renewal(30.0)
    lease.answered(RenewedLease(remaining=duration(0.001)), sent=110.0)
    assert lease.due == 110.1


@pytest.mark.parametrize(
    ("value", "kind", "reason"),
    [
        (FAILURE_REASON_LEASE_EXPIRED, PreconditionFailed, Reason.LEASE_EXPIRED),
        (FAILURE_REASON_LEASE_NOT_FOUND, NotFound, Reason.LEASE_NOT_FOUND),
        (FAILURE_REASON_INCARNATION_CHANGED, Aborted, Reason.INCARNATION_CHANGED),
        (999, PreconditionFailed, Reason.INTERNAL),
        (0, PreconditionFailed, Reason.LEASE_EXPIRED),
    ],
)
def test_a_row_that_is_no_renewal_is_the_end_with_its_reason(value: Any, kind: type, reason: Reason) -> None:
    lease = renewal()
    lease.answered(RenewedLease(reason=value), sent=110.0)
    assert type(lease.error) is kind
    assert lease.error is not None
    assert lease.error.reason is reason


def test_the_first_end_counts_and_is_told_once() -> None:
    told: list[int] = []
    lease = renewal()
    lease.on_end = lambda: told.append(1)
    lease.answered(MISSING, sent=110.0)
    lease.end(Aborted(Reason.INCARNATION_CHANGED, "later"))
    assert lease.error is not None
    assert (lease.error.reason, told) == (Reason.LEASE_NOT_FOUND, [1])


def test_a_renewal_without_an_answer_is_repeated_until_the_lease_is_over() -> None:
    lease = renewal(30.0)
    why = Unavailable(Reason.PEER_UNREACHABLE, "away")
    lease.not_answered(why, now=110.0)
    assert lease.due == 111.0
    lease.not_answered(why, now=128.0)
    assert lease.due == 128.5
    lease.not_answered(Exhausted(Reason.QUEUE_FULL, "full", retry_delay_s=5.0), now=129.0)
    assert lease.due == 130.0
    assert lease.overdue(129.9) is None
    error = lease.overdue(130.0)
    assert error is not None
    assert error.reason is Reason.LEASE_EXPIRED
    assert "full" in str(error)


# ---- over a socket


async def test_a_lease_is_granted_renewed_over_one_stream_and_released(client: Client, ledger: Ledger) -> None:
    async with client.lease([1, 2], [3, 4], request_id="a", ttl_s=1.2) as held:
        assert (held.lease_id, held.grant) == ("l-a", Grant(token=b"t"))
        await ledger.batches(3)
        held.check()
        assert held.reason is None
        assert ledger.released == []
    assert ledger.released == ["l-a"]
    assert (set(ledger.over), ledger.streams) == ({"stream"}, 1)
    assert all(seen.time_s is not None for seen in ledger.server.seen)


async def test_without_a_stream_leases_are_renewed_by_calls(client: Client, ledger: Ledger) -> None:
    ledger.serve(stream=False)
    async with client.lease([1], [2], request_id="a") as held:
        await ledger.batches(2)
        held.check()
    assert set(ledger.over) == {"unary"}
    assert len([seen for seen in ledger.server.seen if seen.method == "KeepAlive"]) == 1


async def test_a_stream_that_ends_is_replaced(client: Client, ledger: Ledger) -> None:
    async def once(requests: Any, context: Any) -> AsyncIterator[KeepAliveResponse]:
        ledger.streams += 1
        async for request in requests:
            yield KeepAliveResponse(leases=ledger.rows(request, "stream"))
            return

    ledger.server.answers["KeepAlive"] = once
    async with client.lease([1], [2], request_id="a") as held:
        await ledger.batches(3)
        held.check()
    assert ledger.streams == 2
    assert ledger.over[:3] == ["stream", "unary", "stream"]


async def test_a_silent_stream_costs_no_lease(client: Client, ledger: Ledger) -> None:
    async def silent(requests: Any, context: Any) -> AsyncIterator[KeepAliveResponse]:
        await asyncio.Event().wait()
        yield KeepAliveResponse()

    ledger.server.answers["KeepAlive"] = silent
    ledger.ttl_s = 1.2
    async with client.lease([1], [2], request_id="a") as held:
        await ledger.batches(2)
        held.check()
    assert set(ledger.over) == {"unary"}


async def test_an_existing_lease_is_taken_over_by_grant_id_or_message(client: Client, ledger: Ledger) -> None:
    grant = Grant(token=b"t", lease_id="g")
    for lease, name in ((grant, "g"), ("i", "i"), (Lease(lease_id="m"), "m")):
        async with client.keep_alive(lease) as held:
            assert (held.lease_id, held.grant) == (name, grant if lease is grant else None)
            assert [name] in await ledger.batches(2)
    assert ledger.released == ["", "i", "m"]
    assert ledger.server.requests("ReleaseLease")[0].lease.grant == grant


async def test_a_lease_may_outlive_its_keeper(client: Client, ledger: Ledger) -> None:
    async with client.keep_alive("l", release=False):
        pass
    assert ledger.released == []


async def test_a_lease_that_is_over_cannot_be_taken_over(client: Client, ledger: Ledger) -> None:
    ledger.reason = FAILURE_REASON_LEASE_EXPIRED
    with pytest.raises(PreconditionFailed) as raised:
        async with client.keep_alive("l"):
            pytest.fail("entered")
    assert raised.value.reason is Reason.LEASE_EXPIRED
    assert ledger.released == []


async def test_all_leases_of_a_client_go_in_one_batch(client: Client, ledger: Ledger) -> None:
    ledger.ttl_s = 1.5
    names = ["a", "b", "c"]
    async with (
        client.lease([1], [2], request_id="a"),
        client.lease([1], [2], request_id="b"),
        client.lease([1], [2], request_id="c"),
    ):
        (batch,) = await ledger.batches(1)
    assert sorted(batch) == [f"l-{name}" for name in names]


@pytest.mark.parametrize("reason", [Reason.LEASE_EXPIRED, Reason.LEASE_RELEASED, Reason.INCARNATION_CHANGED])
async def test_the_holder_hears_of_the_end(client: Client, ledger: Ledger, reason: Reason) -> None:
    async with client.lease([1], [2], request_id="a") as held, asyncio.timeout(UNTIL_S):
        ledger.reason = FailureReason.Value(f"FAILURE_REASON_{reason.name}")
        assert await held.wait_over() is reason
        assert held.reason is reason
        with pytest.raises((PreconditionFailed, Aborted)) as raised:
            held.check()
        assert raised.value.reason is reason
    assert ledger.released == []  # a lease that is over needs no release


async def test_renewals_do_not_join_the_trace_of_the_first_holder(client: Client, ledger: Ledger) -> None:
    span = NonRecordingSpan(SpanContext(1 << 120, 1 << 60, is_remote=False))
    with trace.use_span(span):
        async with client.lease([1], [2], request_id="a"):
            await ledger.batches(2)
    traced = {seen.method for seen in ledger.server.seen if "traceparent" in seen.metadata}
    assert traced == {"GrantLease", "ReleaseLease"}


async def test_batches_are_bounded(client: Client, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "BATCH_MAX", 2)
    ledger.ttl_s = 1.5
    async with AsyncExitStack() as stack:
        for name in "abcde":
            await stack.enter_async_context(client.lease([1], [2], request_id=name))
        batches = await ledger.batches(3)
    assert [len(batch) for batch in batches] == [2, 2, 1]


async def test_one_lease_that_is_over_does_not_end_the_others(client: Client, ledger: Ledger) -> None:
    def rows(request: Any, way: str) -> list[RenewedLease]:
        ids = [ref.lease_id for ref in request.leases]
        ledger.renewed.put_nowait(ids)
        return [MISSING if id_ == "l-a" else RenewedLease(remaining=duration(ledger.ttl_s)) for id_ in ids]

    ledger.rows = rows  # type: ignore[method-assign]
    async with client.lease([1], [2], request_id="a") as lost, client.lease([1], [2], request_id="b") as held:
        async with asyncio.timeout(UNTIL_S):
            assert await lost.wait_over() is Reason.LEASE_NOT_FOUND
            while await ledger.renewed.get() != ["l-b"]:
                pass
        held.check()


async def test_a_lease_that_cannot_be_renewed_in_time_is_over(client: Client, ledger: Ledger) -> None:
    ledger.ttl_s = 0.3
    async with asyncio.timeout(UNTIL_S), client.lease([1], [2], request_id="a") as held:
        await ledger.server.stop()
        assert held.state == LEASE_STATE_LIVE
        assert await held.wait_over() is Reason.LEASE_EXPIRED
        assert held.state == LEASE_STATE_EXPIRED
        with pytest.raises(PreconditionFailed, match="could not be renewed in time"):
            held.check()


async def test_a_server_away_for_a_moment_costs_no_lease(client: Client, ledger: Ledger) -> None:
    ledger.ttl_s = 3.0
    async with asyncio.timeout(UNTIL_S), client.lease([1], [2], request_id="a") as held:
        await ledger.batches(1)
        await ledger.server.stop()
        await ledger.server.start()
        await ledger.batches(1)
        held.check()


async def test_a_release_that_fails_is_an_error_but_hides_none(client: Client, ledger: Ledger) -> None:
    ledger.server.answers["ReleaseLease"] = failing(grpc.StatusCode.INTERNAL, "INTERNAL")
    with pytest.raises(KeyError) as raised:
        async with client.lease([1], [2], request_id="a"):
            raise KeyError("mine")
    assert "could not be released" in raised.value.__notes__[0]
    with pytest.raises(Exception, match="as the test says"):
        async with client.lease([1], [2], request_id="a"):
            pass


async def test_a_release_of_what_has_just_ended_is_fine(client: Client, ledger: Ledger) -> None:
    ledger.server.answers["ReleaseLease"] = failing(grpc.StatusCode.NOT_FOUND, "LEASE_NOT_FOUND")
    async with client.lease([1], [2], request_id="a"):
        pass
    assert ledger.released == ["l-a"]


async def test_closing_the_client_ends_the_renewals_and_says_so(server: FakeServer, ledger: Ledger) -> None:
    client = connect(server.address)
    manager = client.lease([1], [2], request_id="a")
    held = await manager.__aenter__()
    await ledger.batches(1)
    await client.close()
    async with asyncio.timeout(UNTIL_S):
        assert await held.wait_over() is Reason.LEASE_EXPIRED


async def test_a_server_that_answers_with_too_few_rows_is_not_believed(client: Client, ledger: Ledger) -> None:
    ledger.rows = lambda request, way: []  # type: ignore[method-assign]
    ledger.ttl_s = 0.6
    async with client.lease([1], [2], request_id="a") as held, asyncio.timeout(UNTIL_S):
        assert await held.wait_over() is Reason.LEASE_EXPIRED
        with pytest.raises(PreconditionFailed, match="0 rows"):
            held.check()
