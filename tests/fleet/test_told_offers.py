"""What leads tell of their offers becomes rows of the index of offers, and leaves it when the offers end."""

import random
from hashlib import sha256

from kvgrpc.core.tables import offer_index
from kvgrpc.core.tables.offer_index import OfferIndex
from kvgrpc.core.values import content as contents
from kvgrpc.core.values.content import ContentId
from kvgrpc.core.values.limits import Limits
from kvgrpc.fleet import offered
from kvgrpc.fleet.offered import DIGEST_BYTES, OFFER_DIGESTS_MAX, OfferBook, OfferedPrefixes, tenant_part
from kvgrpc.fleet.prefixes import STEP_UNITS, PrefixIndex


def chain(*parts: tuple[int, int]) -> list[bytes]:
    """Returns a chain of `units` units for each (seed, units)."""
    made, last = [], b""
    for seed, units in parts:
        for _ in range(units):
            last = sha256(last + bytes([seed])).digest()
            made.append(last)
    return made


def told(units: list[bytes]) -> bytes:
    """Returns what a lead tells of a chain."""
    index = OfferIndex(Limits())
    index.add("l", "", ContentId(len(units) * contents.UNIT_TOKENS, b"".join(units)))
    (offer,) = index.all_of("").offered
    return offer.told_digests


def test_leads_and_indexes_agree_on_the_digests_that_count() -> None:
    assert (offer_index.STEP_UNITS, contents.DIGEST_BYTES) == (STEP_UNITS, DIGEST_BYTES)
    prompt = chain((1, 40))
    index, own = OfferedPrefixes(), PrefixIndex()
    index.book("p").began(1, told(prompt))
    own.add("p", prompt)
    assert index.units_held(prompt) == own.units_held(prompt) == {"p": 2 * STEP_UNITS}


def test_an_offer_that_ended_is_held_no_longer_and_what_it_shared_with_another_still_is() -> None:
    index = OfferedPrefixes()
    of = index.book("p")
    short, long = chain((1, 16)), chain((1, 16), (2, 32))
    of.began(1, told(short))
    of.began(2, told(long))
    assert index.units_held(long) == {"p": 48}
    of.ended(2)
    of.ended(2)
    assert index.units_held(long) == {"p": 16}
    of.ended(1)
    assert (index.units_held(long), len(index), index.engine_count) == ({}, 0, 0)


def test_a_snapshot_replaces_what_one_engine_told_and_nothing_of_others() -> None:
    index = OfferedPrefixes()
    one, other = index.book("p1"), index.book("p2")
    prompt = chain((1, 32))
    for of in (one, other):
        of.began(7, told(prompt))
    assert index.units_held(prompt) == {"p1": 32, "p2": 32}
    list(one.forget())
    assert index.units_held(prompt) == {"p2": 32}
    one.began(7, told(prompt[:16]))
    assert index.units_held(prompt) == {"p2": 32, "p1": 16}


def test_the_offers_of_one_tenant_say_nothing_about_the_prompts_of_another() -> None:
    index = OfferedPrefixes()
    prompt = chain((1, 16))
    index.book("p", "red").began(1, told(prompt))
    for tenant, found in (("red", {"p": 16}), ("blue", {}), ("", {})):
        assert index.units_held([tenant_part(tenant) + digest for digest in prompt]) == found, tenant


def test_an_engine_that_tells_too_much_loses_its_oldest_offers_and_no_other_engine_does() -> None:
    index = OfferedPrefixes(most=30)
    flood, quiet = index.book("flood"), index.book("quiet")
    ours = chain((9, 16))
    quiet.began(1, told(ours))
    floods = [chain((seed, 16)) for seed in range(100, 160)]
    for number, prompt in enumerate(floods):
        flood.began(number, told(prompt))
        assert len(index) <= 30
    assert index.units_held(ours) == {"quiet": 16}
    assert (index.units_held(floods[0]), index.units_held(floods[-1])) == ({}, {"flood": 16})
    for number in range(100, 1_000):
        flood.began(number, b"")
        assert len(index) <= 30, "offers without digests are bounded, too"
    assert index.units_held(ours) == {"quiet": 16}


def test_an_engine_that_came_later_gets_its_share_of_a_full_index() -> None:
    index = OfferedPrefixes(most=30)
    first, later = index.book("first"), index.book("later")
    for number in range(60):
        first.began(number, told(chain((number, 16))))
    late = [chain((seed, 16)) for seed in range(100, 105)]
    for number, prompt in enumerate(late):
        later.began(number, told(prompt))
    assert all(index.units_held(prompt) == {"later": 16} for prompt in late)
    assert first.rows > 0


def test_one_offer_costs_an_engine_that_holds_the_whole_index_a_bounded_number_of_rows() -> None:
    index = OfferedPrefixes(most=20_000)
    first, later = index.book("first"), index.book("later")
    digests = [(number * 100).to_bytes(30, "big") for number in range(2_000)]
    for number, digest in enumerate(digests):
        first.began(number, b"".join(digest + at.to_bytes(2, "big") for at in range(10)))
    costs = []
    for number in range(1_000):
        before = first.rows
        later.began(number, b"".join(bytes([7]) * 30 + (number * 10 + at).to_bytes(2, "big") for at in range(10)))
        costs.append(before - first.rows)
    assert max(costs) <= offered.LOST_AT_ONCE + 2 * 11
    assert later.rows > 0.4 * 20_000


def test_one_offer_tells_as_much_as_a_choice_looks_at_and_a_digest_counts_once() -> None:
    index = OfferedPrefixes()
    of = index.book("p")
    of.began(1, bytes(range(DIGEST_BYTES)) * 5_000)
    assert of.rows == 2
    of.began(2, b"".join(n.to_bytes(DIGEST_BYTES, "big") for n in range(5_000)))
    assert of.rows == 2 + 1 + OFFER_DIGESTS_MAX
    assert list(of.forget()) == [2, 1 + OFFER_DIGESTS_MAX]
    assert len(index) == 0


def test_a_look_up_finds_a_bounded_number_of_holders_those_of_the_longest_prefix_first() -> None:
    index = OfferedPrefixes()
    short, long = chain((1, 16)), chain((1, 32))
    index.book("long").began(1, told(long))
    for number in range(2 * offered.HOLDERS_MAX):
        index.book(f"p{number}").began(1, told(short))
    found = index.units_held(long)
    assert found.pop("long") == 32
    assert set(found.values()) == {16}
    assert len(found) <= 2 * offered.HOLDERS_MAX


def test_the_index_has_what_the_living_offers_hold_whatever_came_before() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        index = OfferedPrefixes()
        of: dict[str, OfferBook] = {name: index.book(name) for name in ("p1", "p2", "p3")}
        live: dict[tuple[str, int], list[bytes]] = {}
        for number in range(60):
            name = rng.choice(list(of))
            if rng.random() < 0.6:
                live[name, number] = chain(*((rng.randrange(2), 16) for _ in range(rng.randrange(1, 4))))
                of[name].began(number, told(live[name, number]))
            elif mine := [key for key in live if key[0] == name]:
                del live[(gone := rng.choice(mine))]
                of[name].ended(gone[1])
            wanted = chain(*((rng.randrange(2), 16) for _ in range(3)))
            expected: dict[str, int] = {}
            for (holder, _), held in live.items():
                equal = max((n for n in (16, 32, 48) if held[:n] == wanted[:n] and len(held) >= n), default=0)
                expected[holder] = max(expected.get(holder, 0), equal)
            assert index.units_held(wanted) == {name: units for name, units in expected.items() if units}, seed
