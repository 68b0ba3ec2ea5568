"""What leads tell of their offers becomes rows of the index of prefixes, and leaves it when the offers end."""

import random
from hashlib import sha256

import pytest

from kvgrpc.core.tables import offer_index
from kvgrpc.core.tables.offer_index import OfferIndex
from kvgrpc.core.values import content as contents
from kvgrpc.core.values.content import ContentId
from kvgrpc.core.values.limits import Limits
from kvgrpc.fleet import prefixes
from kvgrpc.fleet.prefixes import DIGEST_BYTES, STEP_UNITS, PrefixIndex, ToldOffers


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
    index, own = PrefixIndex(), PrefixIndex()
    ToldOffers("p", index).began(1, told(prompt))
    own.add("p", prompt)
    assert index.units_held(prompt) == own.units_held(prompt) == {"p": 2 * STEP_UNITS}


def test_an_offer_that_ended_is_held_no_longer_and_what_it_shared_with_another_still_is() -> None:
    index = PrefixIndex()
    of = ToldOffers("p", index)
    short, long = chain((1, 16)), chain((1, 16), (2, 32))
    of.began(1, told(short))
    of.began(2, told(long))
    assert index.units_held(long) == {"p": 48}
    of.ended(2)
    of.ended(2)
    assert index.units_held(long) == {"p": 16}
    of.ended(1)
    assert (index.units_held(long), len(index)) == ({}, 0)


def test_a_snapshot_replaces_what_one_engine_told_and_nothing_of_others() -> None:
    index = PrefixIndex()
    one, other = ToldOffers("p1", index), ToldOffers("p2", index)
    prompt = chain((1, 32))
    for of in (one, other):
        of.began(7, told(prompt))
    assert index.units_held(prompt) == {"p1": 32, "p2": 32}
    one.forget()
    assert index.units_held(prompt) == {"p2": 32}
    one.began(7, told(prompt[:16]))
    assert index.units_held(prompt) == {"p2": 32, "p1": 16}


def test_an_engine_that_tells_too_much_is_believed_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "TOLD_MAX", 3)
    index = PrefixIndex()
    of = ToldOffers("p", index)
    first, second = chain((1, 16)), chain((2, 16))
    of.began(1, told(first))
    of.began(2, told(second))
    assert (index.units_held(first), index.units_held(second)) == ({"p": 16}, {})
    for number in range(3, 9):
        of.began(number, b"")
    of.ended(1)
    of.began(9, b"")
    of.began(10, told(second))
    assert index.units_held(second) == {}, "offers without digests are bounded, too"


def test_the_index_has_what_the_living_offers_hold_whatever_came_before() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        index = PrefixIndex()
        of = {name: ToldOffers(name, index) for name in ("p1", "p2", "p3")}
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
