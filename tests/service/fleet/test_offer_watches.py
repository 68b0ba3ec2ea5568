"""What leads offer decides who computes a prompt, as long as they offer it and live."""

import asyncio
from functools import partial
from pathlib import Path

import grpc.aio
import pytest

from kvgrpc.core.values.content import chain
from kvgrpc.fleet.directory import EngineState
from kvgrpc.fleet.offered import OfferedPrefixes
from kvgrpc.fleet.pairing import PairRequest
from kvgrpc.service.fleet import offer_watches
from kvgrpc.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc
from tests.service.conftest import Start
from tests.service.engines import Engine, wait_until
from tests.service.fleet.conftest import EnginesFile, row
from tests.service.fleet.readings import TOKENS, UNITS, ask, digests_of, offer, read, state_of, until
from tests.service.values import prompt


def chain_of(seed: int, tokens: int = TOKENS) -> common_pb2.ContentChain:
    return common_pb2.ContentChain(digests=chain(prompt(tokens, seed)).digests, token_count=tokens)


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


def test_callers_have_equal_shares_of_the_tenants_that_are_heard_and_one_alone_has_all() -> None:
    watches = offer_watches.OfferWatches(OfferedPrefixes(), lambda _: None)
    most = offer_watches.TENANTS_MAX
    assert [watches.asked(f"a{n}", "a", float(n)) for n in range(most + 1)] == [True] * most + [False]
    watches.asked("a0", "a", 99.0)
    assert [watches.asked(f"b{n}", "b", 100.0) for n in range(most)] == [True] * (most // 2) + [False] * (most // 2)
    assert not watches.asked("a1", "a", 101.0), "it made room, as the idlest"
    assert not watches.asked("a0", "b", 102.0), "it is heard already"
    assert [watches.asked(f"c{n}", "c", 103.0) for n in range(most)] == [True] * 2 + [False] * (most - 2)
