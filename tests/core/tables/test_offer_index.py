"""The index of offers finds the longest beginning that a tenant's live leases have, and nothing else."""

import random

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvgrpc.core.tables import offer_index
from kvgrpc.core.tables.offer_index import ENDED_KEPT, STEP_UNITS, OfferChanges, OfferIndex, indexed_bytes
from kvgrpc.core.values.content import DIGEST_BYTES, UNIT_TOKENS, ContentId, chain
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import Exhausted, Reason

TENANTS = ("", "red", "blue")


def index(most: int = 1_000) -> OfferIndex:
    return OfferIndex(Limits(), most)


def content(*units: int, tail: int = 0) -> ContentId:
    """Returns the content of whole units, each of one token id, and of `tail` further tokens."""
    return chain([token for unit in units for token in [unit] * UNIT_TOKENS] + [99] * tail)


def forged(*digests: int) -> ContentId:
    """Returns a content of digests that are no chain: one may stand twice, or in another place."""
    return ContentId(len(digests) * UNIT_TOKENS, b"".join(bytes([one]) * DIGEST_BYTES for one in digests))


def digest_at(of: ContentId, unit: int) -> bytes:
    return of.digests[(unit - 1) * DIGEST_BYTES : unit * DIGEST_BYTES]


def found(by: OfferIndex, wanted: ContentId, tenant: str = "") -> tuple[int, tuple[str, ...]]:
    return by.find(tenant, wanted, 4)


def numbers(changes: OfferChanges | None) -> tuple[list[int], tuple[int, ...]]:
    assert changes is not None
    return [offer.number for offer in changes.offered], changes.ended


def test_the_longest_beginning_is_found_and_the_newest_lease_comes_first() -> None:
    made = index()
    made.add("short", "", content(1))
    made.add("long", "", content(1, 2))
    made.add("longer", "", content(1, 2, 3))
    assert found(made, content(1, 2, 7)) == (2, ("longer", "long"))
    assert found(made, content(1, 7)) == (1, ("longer", "long", "short"))
    assert found(made, content(7, 2)) == (0, ())
    assert made.find("", content(1), 1) == (1, ("longer",))


def test_a_short_last_unit_is_found_by_a_content_that_ends_with_it_alone() -> None:
    made = index()
    made.add("l", "", content(1, tail=5))
    assert found(made, content(1, tail=5)) == (2, ("l",))
    assert found(made, content(1, tail=4)) == (1, ("l",))
    assert found(made, content(1, 99)) == (1, ("l",))


def test_digests_that_are_no_chain_are_found_in_their_places_alone_and_leave_nothing_behind() -> None:
    made = index()
    made.add("l", "", forged(1, 1, 2, 1))
    assert found(made, forged(1, 1, 2, 1)) == (4, ("l",))
    assert found(made, forged(3, 3, 3, 3, 1)) == (0, ())
    assert found(made, forged(3, 1, 3)) == (2, ("l",))
    made.check()
    made.remove("l")
    made.check()
    assert found(made, forged(1)) == (0, ())


def test_nothing_is_found_of_another_tenant_nor_of_the_house() -> None:
    made = index()
    for tenant in TENANTS:
        made.add(f"of {tenant}", tenant, content(1, 2))
    for tenant in TENANTS:
        assert found(made, content(1, 2), tenant) == (2, (f"of {tenant}",))
        assert [offer.lease_id for offer in made.all_of(tenant).offered] == [f"of {tenant}"]
    made.remove("of red")
    assert found(made, content(1, 2), "red") == (0, ())


def test_units_before_the_first_that_can_be_pulled_alone_have_no_row() -> None:
    made = index()
    made.add("l", "", content(1, 2, 3), first_unit=3)
    assert found(made, content(1, 2)) == (0, ())
    assert found(made, content(1, 2, 3, 4)) == (3, ("l",))


def test_the_units_of_a_tenant_and_of_all_are_bounded() -> None:
    made = index(most=8)
    made.add("r", "red", content(1, 2, 3))
    made.check_room("red", 1)
    with pytest.raises(Exhausted, match="this tenant's") as refused:
        made.check_room("red", 2)
    assert (refused.value.reason, refused.value.metadata["limit"]) == (Reason.LIMIT_EXCEEDED, "4")
    made.check_room("", 5)
    made.add("h", "", content(1, 2, 3, 4))
    with pytest.raises(Exhausted, match="all offers"):
        made.check_room("blue", 2)
    made.remove("h")
    made.check_room("blue", 2)


def test_bytes_are_estimated_by_units() -> None:
    assert indexed_bytes(content(1, 2, tail=1)) == 3 * offer_index.UNIT_BYTES


def test_watchers_are_told_what_began_and_what_ended() -> None:
    made = index()
    made.add("a", "", content(1))
    made.add("b", "red", content(1))
    made.add("c", "", content(2))
    assert numbers(made.changes_after("", 0)) == ([1, 3], ())
    assert numbers(made.changes_after("", 1)) == ([3], ())
    made.remove("a")
    made.remove("b")
    assert numbers(made.changes_after("", 3)) == ([], (1,))
    assert numbers(made.changes_after("", 0)) == ([3], (1,))
    assert numbers(made.changes_after("red", 0)) == ([], (2,))
    assert made.all_of("").seq == made.seq == 5
    assert numbers(made.changes_after("", 5)) == ([], ())


def test_ends_that_are_forgotten_are_not_told_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offer_index, "ENDED_KEPT", 2)
    made = index()
    for lease_id in "abc":
        made.add(lease_id, "", content(1))
    for lease_id in "abc":
        made.remove(lease_id)
    assert made.changes_after("", 3) is None
    assert numbers(made.changes_after("", 4)) == ([], (2, 3))
    assert ENDED_KEPT > 2


def test_the_told_digests_are_those_of_unit_one_and_of_whole_steps() -> None:
    made = index()
    units = range(2 * STEP_UNITS + 3)
    made.add("l", "", content(*units))
    made.add("window", "", content(*units), first_unit=STEP_UNITS + 1)
    (whole, window) = made.all_of("").offered
    assert whole.told_digests == b"".join(digest_at(whole.content, unit) for unit in (1, STEP_UNITS, 2 * STEP_UNITS))
    assert window.told_digests == digest_at(window.content, 2 * STEP_UNITS)


class Offers(RuleBasedStateMachine):
    """Compares the index with a search over all live offers, and a watcher's view with what lives."""

    def __init__(self) -> None:
        super().__init__()
        self.index = index(10_000)
        self.live: dict[str, tuple[str, ContentId, int]] = {}
        self.made = 0
        self.seen: dict[str, tuple[int, dict[int, bytes]]] = {tenant: (0, {}) for tenant in TENANTS}

    @rule(
        tenant=st.sampled_from(TENANTS), units=st.lists(st.integers(0, 1), min_size=1, max_size=5),
        tail=st.integers(0, 2), late=st.integers(0, 5), lie=st.booleans(),
    )  # fmt: skip
    def add(self, tenant: str, units: list[int], tail: int, late: int, *, lie: bool) -> None:
        self.made += 1
        made = forged(*units) if lie else content(*units, tail=tail)
        first = min(1 + late, len(made.digests) // DIGEST_BYTES)
        self.live[f"l{self.made}"] = tenant, made, first
        self.index.add(f"l{self.made}", tenant, made, first)

    @precondition(lambda self: self.live)
    @rule(pick=st.randoms(use_true_random=False))
    def remove(self, pick: random.Random) -> None:
        lease_id = pick.choice(list(self.live))
        del self.live[lease_id]
        self.index.remove(lease_id)

    @rule(tenant=st.sampled_from(TENANTS))
    def watch(self, tenant: str) -> None:
        seq, view = self.seen[tenant]
        changes = self.index.changes_after(tenant, seq)
        assert changes is not None
        for offer in changes.offered:
            view[offer.number] = offer.content.digests
        for number in changes.ended:
            view.pop(number, None)
        self.seen[tenant] = changes.seq, view
        assert sorted(view.values()) == sorted(made.digests for of, made, _ in self.live.values() if of == tenant)

    @rule(
        tenant=st.sampled_from(TENANTS), units=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        tail=st.integers(0, 2), lie=st.booleans(),
    )  # fmt: skip
    def find(self, tenant: str, units: list[int], tail: int, *, lie: bool) -> None:
        wanted = forged(*units) if lie else content(*units, tail=tail)
        most = 0
        leases: list[str] = []
        for lease_id, (of, made, first) in self.live.items():
            common = [
                unit for unit in range(first, min(len(made.digests), len(wanted.digests)) // DIGEST_BYTES + 1)
                if of == tenant and digest_at(made, unit) == digest_at(wanted, unit)
            ]  # fmt: skip
            units_held = max(common, default=0)
            if units_held > most:
                most, leases = units_held, []
            if units_held == most and most:
                leases.append(lease_id)
        assert self.index.find(tenant, wanted, 99) == (most, tuple(reversed(leases)))

    @invariant()
    def rows_are_those_of_the_offers(self) -> None:
        self.index.check()
        assert [offer.lease_id for offer in self.index] == list(self.live)


TestOffers = Offers.TestCase
TestOffers.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.sampled_from(TENANTS), max_size=30))
def test_an_index_whose_offers_have_all_ended_keeps_no_row(tenants: list[str]) -> None:
    made = index()
    for number, tenant in enumerate(tenants):
        made.add(str(number), tenant, content(number % 3, 1))
    for number in range(len(tenants)):
        made.remove(str(number))
    made.check()
    assert not made._rows
    assert not made._units
