"""A decode engine finds by its prompt alone which lead holds the KV, and pulls it; nothing is found that has ended."""

from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from kvgrpc.client import Client, connect, connect_sync
from kvgrpc.core.values.content import chain
from kvgrpc.engine import BlocksReturned, HandOver, Received, content
from kvgrpc.errors import Reason
from kvgrpc.v1 import lease_pb2
from tests.engine.conftest import SETTINGS, Attach
from tests.engine.support import Lead, Side, failure, new_key, tokens

PREFIX, PROMPT = tokens(48), [*tokens(48), *tokens(30, seed=7)]
OTHER = tokens(64, seed=9)
SOURCE, TARGET = [4, 2, 9], [30, 31, 5, 6, 7]
Found = lease_pb2.FoundOffer


@pytest.fixture(scope="module")
def third(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lead]:
    folder: Path = tmp_path_factory.mktemp("third")
    lead = Lead(folder, "P2", settings=SETTINGS)
    try:
        yield lead.wait_ready()
    finally:
        lead.close()


def find(side: Side, prompt: list[int], tenant: str = "") -> list[Found]:
    """Asks a lead, as the decode engine or a router would."""
    with connect_sync(side.engine.address) as client:
        reply = client.find_offers(prompt, tenant=tenant)
    assert bool(reply.fingerprint) == bool(reply.offers)
    return list(reply.offers)


def release(side: Side, offered: HandOver) -> None:
    """Ends the lease of a hand-over, and waits until its engine has its blocks back."""
    ref = lease_pb2.LeaseRef(lease_id=offered.lease_id)
    side.api.leases.ReleaseLease(lease_pb2.ReleaseLeaseRequest(lease=ref))
    side.finish(offered)


def test_a_prefix_is_pulled_from_the_lead_that_has_it_and_from_no_other(
    pair: tuple[Side, Side], third: Lead, attach: Attach
) -> None:
    (p1, d), p2 = pair, attach(third)
    p2.fill(SOURCE, seed=2)
    other = p2.hand_over([*SOURCE, 11], OTHER, findable=True)
    made = p1.fill(SOURCE, seed=1)
    offered = p1.hand_over(SOURCE, PREFIX, findable=True)
    p1.round_trip()
    p2.round_trip()
    answers = {side.lead.name: find(side, PROMPT) for side in (p2, p1)}
    assert answers["P2"] == []
    (offer,) = answers["P"]
    assert offer.token_count == 48
    assert 0 < offer.remaining.ToTimedelta().total_seconds() <= 300
    assert offer.grant.lease_id == offered.lease_id
    pull = d.engine.pull(offer.grant.token, content(PROMPT), use_tokens=offer.token_count)
    pull.start(TARGET[:3])
    assert d.finish(pull) == [Received(pull, 48)]
    assert np.array_equal(d.read(TARGET[:3]), made)
    assert p1.finish(offered) == [BlocksReturned(offered)]
    assert find(p1, PROMPT) == []
    release(p2, other)


def test_what_is_equal_at_the_beginning_is_enough(pair: tuple[Side, Side]) -> None:
    p, d = pair
    made = p.fill(SOURCE, seed=3)
    offered = p.hand_over(SOURCE, PREFIX, findable=True, consumers=2)
    p.round_trip()
    edited = [*PREFIX[:20], *OTHER]
    (offer,) = find(p, edited)
    assert offer.token_count == 16
    pull = d.engine.pull(offer.grant.token, content(edited), use_tokens=16)
    pull.start(TARGET[:1])
    assert d.finish(pull) == [Received(pull, 16)]
    assert np.array_equal(d.read(TARGET[:1]), made[:, :1])
    assert [row.token_count for row in find(p, PREFIX)] == [48], "the second consumer may still come"
    release(p, offered)
    assert find(p, PREFIX) == []


def test_a_grant_that_was_found_is_void_once_the_lease_has_ended(pair: tuple[Side, Side]) -> None:
    p, d = pair
    offered = p.hand_over(SOURCE, PREFIX, findable=True)
    p.round_trip()
    (offer,) = find(p, PREFIX)
    release(p, offered)
    pull = d.engine.pull(offer.grant.token, content(PREFIX), use_tokens=48)
    pull.start(TARGET[:3])
    assert failure(d.finish(pull)).reason is Reason.LEASE_RELEASED


def test_a_hand_over_for_a_tenant_is_found_in_that_tenant_alone(pair: tuple[Side, Side]) -> None:
    p, _ = pair
    offered = p.hand_over(SOURCE, PREFIX, findable=True, tenant="red")
    p.round_trip()
    assert [len(find(p, PREFIX, tenant)) for tenant in ("red", "blue", "")] == [1, 0, 0]
    release(p, offered)


def test_a_findable_hand_over_that_is_refused_gives_its_blocks_back(pair: tuple[Side, Side]) -> None:
    p, _ = pair
    offered = p.engine.finished_blocks(
        SOURCE, content(opaque_id=b"x", tokens=48), transfer_key=new_key(), findable=True
    )
    p.engine.flush()
    events = p.finish(offered)
    assert failure(events).reason is Reason.CONTENT_REQUIRED
    assert events[-1] == BlocksReturned(offered)


def test_one_engine_offers_blocks_to_everybody_that_another_request_hands_over(pair: tuple[Side, Side]) -> None:
    p, d = pair
    made = p.fill(SOURCE, seed=4)
    handed = p.hand_over(SOURCE, PREFIX)
    offered = p.hand_over(SOURCE, PREFIX, findable=True, consumers=9, firm_ttl_s=0.0)
    p.round_trip()
    (offer,) = find(p, PREFIX)
    for grant in (offer.grant.token, handed.grant):
        pull = d.engine.pull(grant, content(PREFIX))
        pull.start(TARGET[:3])
        assert d.finish(pull) == [Received(pull, 48)]
        assert np.array_equal(d.read(TARGET[:3]), made)
    assert p.finish(handed) == [BlocksReturned(handed)]
    assert len(find(p, PREFIX)) == 1
    assert p.engine.reclaim(len(SOURCE)).enough
    assert find(p, PREFIX) == []
    assert failure(p.finish(offered)).reason is Reason.LEASE_RECLAIMED


def test_nothing_is_found_of_an_engine_that_left(leads: tuple[Lead, Lead], attach: Attach) -> None:
    first = attach(leads[0])
    first.hand_over(SOURCE, PREFIX, findable=True)
    first.round_trip()
    assert len(find(first, PREFIX)) == 1
    first.close()
    leads[0].wait_no_engine()
    assert find(attach(leads[0]), PREFIX) == []


async def told(client: Client, *, after: lease_pb2.WatchOffersResponse | None = None) -> lease_pb2.WatchOffersResponse:
    """Returns the first message of a watch."""
    async with aclosing(client.watch_offers(after=after)) as watch:
        event = await anext(watch)
    assert isinstance(event, lease_pb2.WatchOffersResponse)
    return event


async def test_a_watch_tells_everything_and_then_what_changed_and_resumes(pair: tuple[Side, Side]) -> None:
    p, _ = pair
    offered = p.hand_over(SOURCE, PREFIX, findable=True)
    p.round_trip()
    async with connect(p.engine.address) as client, aclosing(client.watch_offers()) as watch:
        first = await anext(watch)
        assert isinstance(first, lease_pb2.WatchOffersResponse)
        (one,) = first.changes
        assert (first.snapshot, first.header.incarnation) == (True, p.engine.incarnation)
        assert (one.token_count, one.digests, one.ended) == (48, chain(PREFIX).digest(16), False)
        release(p, offered)
        ended = await anext(watch)
        assert isinstance(ended, lease_pb2.WatchOffersResponse)
        gone = [lease_pb2.OfferChange(offer_number=one.offer_number, ended=True)]
        assert (ended.snapshot, list(ended.changes)) == (False, gone)
        again = await told(client, after=first)
        assert (again.snapshot, list(again.changes), again.offer_seq) == (False, gone, ended.offer_seq)
        nothing = await told(client, after=ended)
        assert (nothing.snapshot, list(nothing.changes)) == (False, [])


async def test_a_watch_of_another_life_starts_over(leads: tuple[Lead, Lead], attach: Attach) -> None:
    first = attach(leads[0])
    first.hand_over(SOURCE, PREFIX, findable=True)
    first.round_trip()
    async with connect(first.engine.address) as client, aclosing(client.watch_offers()) as watch:
        before = await anext(watch)
        assert isinstance(before, lease_pb2.WatchOffersResponse)
        first.close()
        leads[0].wait_no_engine()
        second = attach(leads[0])
        async for event in watch:
            assert isinstance(event, lease_pb2.WatchOffersResponse)
            if event.header.incarnation == second.engine.incarnation:
                assert (event.snapshot, list(event.changes)) == (True, [])
                break
        again = await told(client, after=before)
        assert again.snapshot
