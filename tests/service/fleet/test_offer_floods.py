"""A lead that floods offers, or tells what is not so, costs a reader a bounded number of rows, and others nothing."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvgrpc.fleet.directory import EngineState, ListedEngine
from kvgrpc.fleet.history import EngineRow
from kvgrpc.fleet.offered import OfferedPrefixes
from kvgrpc.fleet.pairing import PairRequest, PickedPair
from kvgrpc.service.fleet import offer_watches
from kvgrpc.v1 import common_pb2, handshake_pb2, handshake_pb2_grpc, lease_pb2, lease_pb2_grpc
from tests.fleet.entries import entry
from tests.service.conftest import Start
from tests.service.fleet.readings import UNITS, ask, digests_of, offer, read, until


class Liar(
    health_pb2_grpc.HealthServicer,  # type: ignore[misc] # it has no types
    handshake_pb2_grpc.HandshakeServiceServicer,
    lease_pb2_grpc.LeaseServiceServicer,
):
    """A lead that is healthy, and tells of its offers what a test wants, without an end."""

    def __init__(self, engine_id: str, *told: lease_pb2.WatchOffersResponse) -> None:
        self.engine_id, self.told = engine_id, told
        self.asked = 0
        self.sent = 0

    def header(self) -> common_pb2.ResponseHeader:
        return common_pb2.ResponseHeader(engine_id=self.engine_id, incarnation=7)

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:  # noqa: N802
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    async def GetEngine(  # noqa: N802
        self, request: handshake_pb2.GetEngineRequest, context: Any
    ) -> handshake_pb2.GetEngineResponse:
        status = handshake_pb2.EngineStatus(admission=handshake_pb2.ADMISSION_OPEN)
        return handshake_pb2.GetEngineResponse(header=self.header(), status=status)

    async def WatchOffers(  # noqa: N802
        self, request: lease_pb2.WatchOffersRequest, context: Any
    ) -> AsyncIterator[lease_pb2.WatchOffersResponse]:
        self.asked += 1
        for reply in self.told:
            yield reply
        while True:
            reply = lease_pb2.WatchOffersResponse(header=self.header(), offer_seq=self.sent + 1)
            for _ in range(500):
                self.sent += 1
                reply.changes.add(offer_number=self.sent, digests=self.sent.to_bytes(32, "big"))
            yield reply


@asynccontextmanager
async def lying(liars: Sequence[Liar]) -> AsyncIterator[dict[str, str]]:
    """Serves liars. Yields their addresses."""
    servers, addresses = [], {}
    for liar in liars:
        server = grpc.aio.server()
        health_pb2_grpc.add_HealthServicer_to_server(liar, server)
        handshake_pb2_grpc.add_HandshakeServiceServicer_to_server(liar, server)
        lease_pb2_grpc.add_LeaseServiceServicer_to_server(liar, server)
        addresses[liar.engine_id] = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)
    try:
        yield addresses
    finally:
        for server in servers:
            await server.stop(0)


def snapshot(header: common_pb2.ResponseHeader, *digests: bytes, **fields: Any) -> lease_pb2.WatchOffersResponse:
    changes = [lease_pb2.OfferChange(offer_number=n, digests=one) for n, one in enumerate(digests, 1)]
    return lease_pb2.WatchOffersResponse(**{"header": header, "snapshot": True, "changes": changes, **fields})


async def test_a_lead_that_floods_offers_takes_no_place_of_others(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvgrpc.fleet.offered.OfferedPrefixes.__init__.__defaults__", (400,))
    (a,) = await asyncio.to_thread(start, ("--engine-id", "a"))
    await asyncio.to_thread(offer, a, 0)
    liar = Liar("liar")
    liar.told = (snapshot(liar.header()),)
    async with (
        lying([liar]) as addresses,
        read(tmp_path, {"a": a.address, **addresses}) as (reader, reading),
    ):
        offers = reading.picker.offers
        await ask(reader)
        await until(lambda: liar.sent > 5_000 and bool(offers.units_held(digests_of(0))))
        assert len(offers) <= 400
        before = liar.sent
        await until(lambda: liar.sent > before + 2_000)
        assert offers.units_held(digests_of(0)) == {"a": UNITS}
        _, found = await reader.pick_pair(PairRequest(chain=digests_of(0)))
        assert isinstance(found, PickedPair)
        assert found.prefill.entry.engine_id == "a"


async def test_what_is_no_answer_of_the_engine_is_not_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offer_watches, "CHANGES_MAX", 3)
    monkeypatch.setattr(offer_watches, "DIGESTS_BYTES_MAX", 4 * len(digests_of(0)[0]))
    digest = digests_of(0)[0]
    new_life = common_pb2.ResponseHeader(engine_id="new-life", incarnation=8)
    liars = [
        Liar("other", snapshot(Liar("x").header(), digest)),
        Liar("no-snapshot", snapshot(Liar("no-snapshot").header(), digest, snapshot=False)),
        Liar("many", snapshot(Liar("many").header(), *[digest] * 4)),
        Liar("long", snapshot(Liar("long").header(), digest * 5)),
        Liar("new-life", snapshot(Liar("new-life").header(), digest), snapshot(new_life, digest, snapshot=False)),
    ]
    async with (
        lying(liars) as addresses,
        read(tmp_path, addresses) as (reader, reading),
    ):
        await ask(reader)
        await until(lambda: all(liar.asked for liar in liars))
        await until(lambda: len(reading.picker.offers) == 0)
        assert reading.offer_watches is not None
        assert reading.offer_watches.count == len(liars)
        assert {liar.asked for liar in liars} == {1}, "another try changes nothing"


@asynccontextmanager
async def steps_of(index: OfferedPrefixes) -> AsyncIterator[list[int]]:
    """Yields a list of how much the number of rows has changed in each turn of the event loop within the context."""
    steps: list[int] = []

    async def look() -> None:
        before = len(index)
        while True:
            await asyncio.sleep(0)
            steps.append(len(index) - before)
            before = len(index)

    looking = asyncio.create_task(look())
    try:
        yield steps
    finally:
        looking.cancel()


async def test_a_message_keeps_the_event_loop_for_a_bounded_number_of_rows_whatever_it_has() -> None:
    index = OfferedPrefixes()
    of = entry("p", incarnation=1)
    row = EngineRow("p", 1, of, EngineState.HEALTHY, "", ListedEngine("p", of, 1))
    told = offer_watches._Told(index.book("p"), row)
    digests = [b"".join((number * 1_000 + at).to_bytes(32, "big") for at in range(500)) for number in range(30)]
    header = common_pb2.ResponseHeader(engine_id="p", incarnation=1)
    async with steps_of(index) as steps:
        await told.take(snapshot(header, *digests))
        assert len(index) == 30 * 501
        await told.take(snapshot(header))
        assert len(index) == 0
        await told.take(snapshot(header, *digests))
        short = [lease_pb2.OfferChange(offer_number=number, digests=bytes(32)) for number in range(1, 16)]
        ended = [lease_pb2.OfferChange(offer_number=number, ended=True) for number in range(16, 31)]
        await told.take(lease_pb2.WatchOffersResponse(header=header, changes=[*short, *ended]))
        assert len(index) == 15 * 2, "offers that replace longer ones, and ends of long ones"
        await told.take(snapshot(header, *digests))
        await told.start_over()
        assert len(index) == 0
    assert max(map(abs, steps)) <= offer_watches.ROWS_AT_ONCE + 501


async def test_offers_of_leads_that_are_watched_no_more_are_forgotten_a_bounded_number_of_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    liars = [Liar("a"), Liar("b")]
    for at, liar in enumerate(liars):
        numbers = range(at * 1_000_000, at * 1_000_000 + 10_000, 500)
        chains = [b"".join((first + one).to_bytes(32, "big") for one in range(500)) for first in numbers]
        liar.told = (snapshot(liar.header(), *chains),)
    async with lying(liars) as addresses, read(tmp_path, addresses) as (reader, reading):
        offers = reading.picker.offers
        await ask(reader)
        await until(lambda: len(offers) > 20_000)
        async with steps_of(offers) as steps:
            monkeypatch.setattr(offer_watches, "IDLE_S", 0.0)
            await until(lambda: not len(offers))
        assert max(-step for step in steps) <= offer_watches.ROWS_AT_ONCE + 2 * 501
