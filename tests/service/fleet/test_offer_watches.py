"""What leads offer decides who computes a prompt, as long as they offer it and live, and whatever they tell."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvgrpc.config_fleet import FleetConfig
from kvgrpc.core.values.content import chain
from kvgrpc.fleet.directory import EngineState
from kvgrpc.fleet.history import EngineRow
from kvgrpc.fleet.offered import OfferedPrefixes
from kvgrpc.fleet.pairing import PairRequest, PickedPair
from kvgrpc.service.fleet import offer_watches
from kvgrpc.service.fleet.reader import FleetReader, FleetReading
from kvgrpc.v1 import (
    common_pb2,
    fleet_pb2,
    fleet_pb2_grpc,
    handshake_pb2,
    handshake_pb2_grpc,
    lease_pb2,
    lease_pb2_grpc,
)
from tests.fleet.entries import entry
from tests.service.conftest import Start
from tests.service.engines import Engine, wait_until
from tests.service.fleet.conftest import EnginesFile, row
from tests.service.fleet.readings import connect, until
from tests.service.values import prompt

TOKENS = 256
UNITS = TOKENS // 16


def chain_of(seed: int, tokens: int = TOKENS) -> common_pb2.ContentChain:
    return common_pb2.ContentChain(digests=chain(prompt(tokens, seed)).digests, token_count=tokens)


def digests_of(seed: int) -> list[bytes]:
    """Returns the digests of the whole units of a prompt, as a choice looks them up."""
    return [chain(prompt(TOKENS, seed)).digests[at : at + 32] for at in range(0, UNITS * 32, 32)]


def offer(engine: Engine, seed: int, **fields: Any) -> str:
    """Hands a prompt over so that it can be found. Returns the lease id."""
    return engine.hand_over(prompt(TOKENS, seed), findable=True, **fields).grant.lease_id


def pick(engine: Engine, seed: int, *without: Engine, tenant: str = "") -> fleet_pb2.PickPairResponse:
    excluded = [one.engine_id for one in without]
    asked = fleet_pb2.PickPairRequest(chain=chain_of(seed), excluded_engine_ids=excluded, tenant=tenant)
    return engine.api.fleet.PickPair(asked)


def offered(found: fleet_pb2.PickPairResponse) -> bool:
    return "units held by offers of its lead" in found.reason


def test_a_prompt_goes_to_the_engine_that_offers_its_beginning_until_the_offer_ends(
    start: Start, engines_file: EnginesFile
) -> None:
    p1, p2, d = start(("--engine-id", "p1"), ("--engine-id", "p2"), ("--engine-id", "d"), **engines_file.environment)
    leases = [offer(p2, seed) for seed in range(4)]
    p2.allocate(100)
    engines_file.write([row(p1, role="prefill"), row(p2, role="prefill"), row(d, role="decode")])
    wait_until(lambda: pick(p1, 99).HasField("prefill") and pick(p1, 99, p1).HasField("prefill"))
    wait_until(lambda: 0.1 < pick(p1, 99, p1).cost.prefill_load < 0.9)
    assert pick(p1, 98).prefill.engine.engine_id == "p1", "it is idler"
    wait_until(lambda: offered(pick(p1, 3, p1)), what=lambda: pick(p1, 3, p1))
    found = pick(p1, 0)
    assert (found.prefill.engine.engine_id, found.prefill.held_token_count, found.cost.computed_share) == ("p2", 256, 0)
    assert offered(found), found.reason
    assert pick(p1, 97).prefill.engine.engine_id == "p1"
    for lease_id in leases[1:]:
        p2.release(lease_id)
    wait_until(lambda: not offered(pick(p1, 3, p1)))
    assert pick(p1, 1).prefill.engine.engine_id == "p1", "what has ended is forgotten"
    assert offered(pick(p1, 0))


def test_a_decode_engine_that_offers_the_prompt_comes_first(start: Start, engines_file: EnginesFile) -> None:
    p, d1, d2 = start(("--engine-id", "p"), ("--engine-id", "d1"), ("--engine-id", "d2"), **engines_file.environment)
    hosts = {"p": "x", "d1": "y", "d2": "z"}
    offer(d2, 0)
    offer(d2, 1)
    rows = [row(p, role="prefill"), row(d1, role="decode"), row(d2, role="decode")]
    engines_file.write([{**one, "host": hosts[one["engine_id"]]} for one in rows])
    wait_until(lambda: offered(pick(p, 1, d1)))
    assert pick(p, 9).decode.engine.engine_id == "d1", "it is idler"
    found = pick(p, 0)
    assert (found.decode.engine.engine_id, found.decode.held_token_count, found.cost.distance) == ("d2", 256, 0)


def test_offers_of_one_tenant_move_no_request_of_another(start: Start, engines_file: EnginesFile) -> None:
    p1, p2, d = start(("--engine-id", "p1"), ("--engine-id", "p2"), ("--engine-id", "d"), **engines_file.environment)
    for seed in range(3):
        offer(p2, seed, tenant="red")
    engines_file.write([row(p1, role="prefill"), row(p2, role="prefill"), row(d, role="decode")])
    wait_until(lambda: offered(pick(p1, 2, p1, tenant="red")))
    assert not offered(pick(p1, 0, p1, tenant="blue"))
    assert not offered(pick(p1, 0, p1))
    assert pick(p1, 1, tenant="red").prefill.engine.engine_id == "p2"


def test_a_caller_that_invents_tenants_leaves_places_for_those_of_another(
    start: Start, engines_file: EnginesFile
) -> None:
    p1, p2, d = start(("--engine-id", "p1"), ("--engine-id", "p2"), ("--engine-id", "d"), **engines_file.environment)
    for seed in range(offer_watches.TENANTS_MAX):
        offer(p2, 0, tenant=f"of another {seed}")
    engines_file.write([row(p1, role="prefill"), row(p2, role="prefill"), row(d, role="decode")])
    with grpc.insecure_channel(p1.address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        other = fleet_pb2_grpc.FleetServiceStub(channel)

        def heard(tenant: str) -> bool:
            request = fleet_pb2.PickPairRequest(chain=chain_of(0), excluded_engine_ids=["p1"], tenant=tenant)
            return offered(other.PickPair(request))

        for share in (1, offer_watches.TENANTS_MAX // 2):
            for number in range(2 * offer_watches.TENANTS_MAX):
                pick(p1, 99, tenant=f"invented {number}")
            wait_until(partial(heard, f"of another {share}"))


# -- one reader


def state_of(reading: FleetReading, engine_id: str) -> EngineState | None:
    found = reading.directory.find(engine_id)
    return None if found is None else reading.directory.state(found, asyncio.get_running_loop().time())


@asynccontextmanager
async def read(
    folder: Path, addresses: dict[str, str], **settings: Any
) -> AsyncIterator[tuple[FleetReader, FleetReading]]:
    """Reads a fleet of leads, which are all healthy at first."""
    path = EnginesFile(folder / "engines.json")
    path.write([{"engine_id": of, "addresses": [at]} for of, at in addresses.items()])
    fleet = FleetConfig(registry=path.environment["KVGRPC_FLEET_REGISTRY"], check_every_s=0.5, **settings)
    reader = FleetReader(fleet, connect, lambda _: True, always=True)
    reading = await reader.reading()
    try:
        await until(lambda: all(state_of(reading, of) is EngineState.HEALTHY for of in addresses))
        yield reader, reading
    finally:
        await reader.stop()


async def ask(reader: FleetReader, *seeds: int, tenant: str = "") -> None:
    """Asks for a pair with the chain of each prompt."""
    for seed in seeds or (99,):
        await reader.pick_pair(PairRequest(chain=digests_of(seed), tenant=tenant))


async def test_leads_are_watched_while_chains_are_asked_for_and_a_dead_one_is_forgotten_as_it_fails(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await asyncio.to_thread(start, ("--engine-id", "a"), ("--engine-id", "b"))
    for engine in (a, b):
        await asyncio.to_thread(offer, engine, 0)
    addresses = {"a": a.address, "b": b.address}
    async with read(tmp_path, addresses) as (reader, reading):
        offers, watches = reading.picker.offers, reading.offer_watches
        assert watches is not None
        await reader.pick_pair(PairRequest())
        assert watches.count == 0, "no chain was asked for"
        await ask(reader)
        await until(lambda: offers.units_held(digests_of(0)) == {"a": UNITS, "b": UNITS})
        b.process.kill()
        await until(lambda: state_of(reading, "b") is EngineState.FAILED)
        await reader.reading()
        assert watches.count == 1, "it is watched no more from the look on that finds it failed"
        await until(lambda: offers.units_held(digests_of(0)) == {"a": UNITS})
        monkeypatch.setattr(offer_watches, "IDLE_S", 0.0)
        await until(lambda: watches.count == 0 and len(offers) == 0)
        monkeypatch.undo()
        await ask(reader)
        await until(lambda: offers.units_held(digests_of(0)) == {"a": UNITS})


async def test_a_watch_that_breaks_goes_on_and_a_new_life_begins_anew(start: Start, tmp_path: Path) -> None:
    (a,) = await asyncio.to_thread(start, ("--engine-id", "a"))
    await asyncio.to_thread(offer, a, 0)
    async with read(tmp_path, {"a": a.address}) as (reader, reading):
        offers = reading.picker.offers
        await ask(reader)
        await until(lambda: len(offers) > 0)
        (one,) = reading.history.by_key().values()
        channel = reading._checks.channel_of(one)
        assert channel is not None
        await channel.close()
        await asyncio.to_thread(offer, a, 1)
        await until(lambda: bool(offers.units_held(digests_of(1))))
        assert offers.units_held(digests_of(0))


async def test_nothing_is_watched_where_the_setting_says_so(start: Start, tmp_path: Path) -> None:
    (a,) = await asyncio.to_thread(start, ("--engine-id", "a"))
    async with read(tmp_path, {"a": a.address}, watch_offers=False) as (reader, reading):
        await ask(reader)
        assert reading.offer_watches is None


async def test_tenants_that_are_heard_are_bounded_and_the_first_ones_stay(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offer_watches, "TENANTS_MAX", 2)
    (a,) = await asyncio.to_thread(start, ("--engine-id", "a"))
    async with read(tmp_path, {"a": a.address}) as (reader, reading):
        for tenant in ("x", "y", "z", "x"):
            await ask(reader, tenant=tenant)
        assert reading.offer_watches is not None
        assert reading.offer_watches.count == 2


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
    row = EngineRow("p", 1, entry("p", incarnation=1), EngineState.HEALTHY, "")
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


def test_callers_have_equal_shares_of_the_tenants_that_are_heard_and_one_alone_has_all() -> None:
    watches = offer_watches.OfferWatches(OfferedPrefixes(), lambda _: None)
    most = offer_watches.TENANTS_MAX
    assert [watches.asked(f"a{n}", "a", float(n)) for n in range(most + 1)] == [True] * most + [False]
    watches.asked("a0", "a", 99.0)
    assert [watches.asked(f"b{n}", "b", 100.0) for n in range(most)] == [True] * (most // 2) + [False] * (most // 2)
    assert not watches.asked("a1", "a", 101.0), "it made room, as the idlest"
    assert not watches.asked("a0", "b", 102.0), "it is heard already"
    assert [watches.asked(f"c{n}", "c", 103.0) for n in range(most)] == [True] * 2 + [False] * (most - 2)
