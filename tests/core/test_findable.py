"""Live leases are found by what their blocks hold: in one tenant, while they live, for a grant that is checked."""

from typing import Any

import pytest

from kvgrpc.core import events
from kvgrpc.core.events import LeaseRef, LeasesVoided, ReclaimBlocks, ReleaseLease
from kvgrpc.core.send import findable
from kvgrpc.core.send.findable import FOUND_MAX, FoundOffer, find_offers
from kvgrpc.core.tables import offer_index
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.offer_index import first_unit, indexed_bytes
from kvgrpc.core.values.content import ContentId
from kvgrpc.core.values.grants import AccessKind, read_claims
from kvgrpc.core.values.layout import Group, GroupKind, PoolKind
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.owners import ENGINE, of_tenant
from kvgrpc.errors import Exhausted, InvalidRequest, NotFound, OutOfRange, PreconditionFailed, Reason
from tests.core.nodes import KEY, Lead, access_id, aliased, claim, content, describe, hybrid, refused
from tests.core.send.lent_blocks import LIMITS, D, key

RED, BLUE = of_tenant("red", "dns:r"), of_tenant("blue", "dns:b")
NEW_KEY = b"a key that is new"


@pytest.fixture
def lead() -> Lead:
    return Lead(describe("p", 1), LIMITS)


def offered(lead: Lead, tokens: int = 48, **fields: Any) -> Any:
    return lead.finish(tokens, findable=True, **fields)


def find(lead: Lead, wanted: ContentId | None, tenant: str = "") -> tuple[FoundOffer, ...]:
    lead.tick(0.0)
    return find_offers(lead.state, wanted, tenant, NEW_KEY)


def found(lead: Lead, wanted: ContentId, tenant: str = "") -> list[tuple[str, int]]:
    return [(offer.lease.id, offer.tokens) for offer in find(lead, wanted, tenant)]


def test_the_longest_beginning_of_a_prompt_is_found_with_a_grant_that_opens(lead: Lead) -> None:
    lead.admit(D)
    offered(lead, 16, key=key(1))
    made = offered(lead, 48, key=key(2))
    (offer,) = find(lead, content(200))
    assert (offer.lease.id, offer.tokens) == (made.lease.id, 48)
    claims = read_claims(offer.token)
    assert (claims.access, claims.lease_id, claims.token_count) == (AccessKind.READ, made.lease.id, 48)
    opening = AccessOpening(access_id(), offer.token, claim(48))
    assert isinstance(lead.opened(D, opening)[0], events.Opened)


def test_a_found_grant_has_the_transfer_key_of_the_search_and_not_that_of_the_hand_over(lead: Lead) -> None:
    made = offered(lead)
    (offer,) = find(lead, content(48))
    assert read_claims(offer.token).transfer_key == NEW_KEY
    assert read_claims(made.token).transfer_key == KEY


def test_a_shorter_prompt_finds_its_whole_units_and_another_one_what_is_equal(lead: Lead) -> None:
    made = offered(lead, 48)
    assert found(lead, content(40)) == [(made.lease.id, 32)]
    other = ContentId(48, content(32).digests + content(48, first=9).digests[-32:])
    assert found(lead, other) == [(made.lease.id, 32)]
    assert found(lead, content(48, first=1)) == []


def test_a_hand_over_that_does_not_say_so_is_not_found(lead: Lead) -> None:
    assert lead.finish(48).lease.findable is False
    assert found(lead, content(48)) == []


def test_as_many_leases_are_found_as_an_answer_names_and_the_newest_come_first(lead: Lead) -> None:
    made = [offered(lead, key=key(number)).lease.id for number in range(1, FOUND_MAX + 2)]
    assert [lease_id for lease_id, _ in found(lead, content(48))] == made[:0:-1]


def test_a_tenant_finds_its_own_leases_alone(lead: Lead) -> None:
    lead.admit(D)
    red = offered(lead, tenant="red", key=key(1)).lease.id
    house = offered(lead, key=key(2)).lease.id
    assert found(lead, content(48), "red") == [(red, 48)]
    assert found(lead, content(48), "blue") == []
    assert found(lead, content(48)) == [(house, 48)]
    (offer,) = find(lead, content(48), "red")
    opening = AccessOpening(access_id(), offer.token, claim(48))
    answer = lead.answer(lead.ask(lambda c: events.OpenAccess(c, "d", 2, (opening,)), BLUE))
    assert isinstance(answer.rows[0], NotFound)


def test_a_caller_offers_for_its_own_tenant() -> None:
    lead = Lead(describe(pool_kind=PoolKind.SERVER_MANAGED))
    given = lead.call(lambda c: events.AllocateBlocks(c, ((0, 3),)), RED)
    blocks = [ids.tolist() for ids in given.blocks]
    made = lead.finish(48, *blocks, findable=True, principal=RED, allocation_id=given.allocation_id)
    assert found(lead, content(48), "red") == [(made.lease.id, 48)]
    assert found(lead, content(48)) == []


@pytest.mark.parametrize("how", ["release", "expiry", "void", "reclaim", "done", "new life", "no engine", "defect"])
def test_nothing_is_found_once_the_lease_has_ended(lead: Lead, how: str) -> None:
    lead.admit(D)
    made = offered(lead, firm_ttl_s=0.0)
    lease_id = made.lease.id
    assert found(lead, content(48)) == [(lease_id, 48)]
    match how:
        case "release":
            lead.call(lambda c: ReleaseLease(c, LeaseRef(lease_id)))
        case "expiry":
            lead.tick(LIMITS.lease_ttl_s)
        case "void":
            lead.feed(LeasesVoided((lease_id,)))
        case "reclaim":
            lead.call(lambda c: ReclaimBlocks(c, ((0, 3),)), ENGINE)
        case "done":
            lead.opened(D, AccessOpening(access_id(), find(lead, content(48))[0].token, claim(48)))
            lead.settle(D)
        case "new life":
            lead.begin(describe("p", 2))
        case "no engine":
            lead.begin(None)
        case "defect":
            node, _ = lead.node.successor(7, lead.now)
            assert find_offers(node.state, content(48), "", NEW_KEY) == ()
            return
    assert found(lead, content(48)) == []


def test_a_found_grant_of_an_ended_lease_opens_nothing(lead: Lead) -> None:
    lead.admit(D)
    made = offered(lead)
    (offer,) = find(lead, content(48))
    lead.call(lambda c: ReleaseLease(c, LeaseRef(made.lease.id)))
    (row,) = lead.opened(D, AccessOpening(access_id(), offer.token, claim(48)))
    assert isinstance(row, PreconditionFailed)
    assert row.reason is Reason.LEASE_RELEASED


def test_a_content_that_was_told_wrong_opens_nothing(lead: Lead) -> None:
    lead.admit(D)
    offered(lead)
    (offer,) = find(lead, content(48))
    (row,) = lead.opened(D, AccessOpening(access_id(), offer.token, claim(48, first=1)))
    assert isinstance(row, PreconditionFailed)
    assert row.reason is Reason.CONTENT_MISMATCH


def test_a_search_claims_no_lease_and_makes_none_firm(lead: Lead) -> None:
    offered(lead, firm_ttl_s=0.0)
    (offer,) = find(lead, content(48))
    assert lead.node.lease_times(offer.lease).soft_in_s == 0.0


def test_a_state_is_found_whole_and_a_window_from_where_its_blocks_serve() -> None:
    state = Lead(describe(pool=hybrid(GroupKind.STATE)))
    made = offered(state, 48).lease.id
    assert found(state, content(64)) == [(made, 48)]
    assert found(state, content(40)) == []
    lead = Lead(describe(pool=aliased(window=32)))
    made = lead.finish(96, range(6), (6, 7), findable=True).lease.id
    assert found(lead, content(112)) == [(made, 96)]
    assert found(lead, content(80)) == []
    window = Group("window", GroupKind.SLIDING_WINDOW, 1, 32, 16, 1, 1, "uint8", window_tokens=32)
    assert first_unit([window], content(112)) == 6
    assert first_unit([window], content(40)) == 1


@pytest.mark.parametrize(
    ("fields", "reason", "says"),
    [
        ({"content": ContentId(48, opaque=b"x")}, Reason.CONTENT_REQUIRED, "digest chain"),
        ({"bound_to": "dns:r"}, Reason.INVALID_FIELD, "for_readers.bound_to"),
        ({"takes_registrations": True}, Reason.INVALID_FIELD, "for_readers.takes_registrations"),
        ({"bound_to": "dns:r", "transfer": False}, Reason.INVALID_FIELD, "'bound_to'"),
    ],
)
def test_a_hand_over_that_cannot_be_for_everybody_is_not_findable(
    lead: Lead, fields: dict[str, Any], reason: Reason, says: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        offered(lead, **fields)
    assert caught.value.reason is reason
    assert says in f"{caught.value} {[repr(one.field) for one in caught.value.violations]}"
    assert len(lead.state.send.leases) == 0


def test_an_index_that_is_full_refuses_the_hand_over_and_takes_one_that_is_not_findable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offer_index.OfferIndex.__init__, "__defaults__", (8,))
    lead = Lead(describe("p", 1), LIMITS)
    offered(lead, 48, tenant="red", key=key(1))
    with refused(Reason.LIMIT_EXCEEDED, Exhausted):
        offered(lead, 32, tenant="red", key=key(2))
    lead.finish(32, tenant="red", key=key(3))
    offered(lead, 32, tenant="blue", key=key(4))
    assert found(lead, content(48), "red")[0][1] == 48


def test_rows_of_the_index_are_part_of_the_bytes_of_their_lease(lead: Lead) -> None:
    plain = lead.finish(48, key=key(1)).lease.id
    made = offered(lead, 48, key=key(2)).lease.id
    kept = lead.state.send.leases.kept_bytes
    assert kept[made] - kept[plain] == indexed_bytes(content(48))
    small = Lead(describe("p", 1), Limits(engine_kept_bytes=12_000))
    small.finish(48, key=key(1))
    with refused(Reason.LIMIT_EXCEEDED, Exhausted):
        offered(small, 48, key=key(2))


def test_only_a_chain_of_bounded_length_is_searched_for(lead: Lead, monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted in (None, ContentId(48, opaque=b"x")):
        with refused(Reason.CONTENT_REQUIRED, InvalidRequest):
            find(lead, wanted)
    monkeypatch.setattr(findable, "FIND_UNITS_MAX", 3)
    find(lead, content(48))
    with pytest.raises(OutOfRange) as caught:
        find(lead, content(49))
    assert (caught.value.reason, caught.value.metadata["limit"]) == (Reason.LIMIT_EXCEEDED, "3")


def test_a_server_that_drains_is_found_by_nobody(lead: Lead) -> None:
    offered(lead)
    lead.call(events.StartDrain, "operator")
    with refused(Reason.DRAINING, PreconditionFailed):
        find(lead, content(48))
