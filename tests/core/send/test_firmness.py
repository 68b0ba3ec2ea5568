"""Firm, claimed, soft: a lease may be taken back only after its firm time, and only while nobody has claimed it."""

from typing import Any

import pytest

from kvgrpc.core import events
from kvgrpc.core.events import LeaseRef, RenewLeases
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.values.grants import OnAbort
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import InvalidRequest, Reason
from tests.core.nodes import Lead, access_id, claim, describe, key_of, refused
from tests.core.pairs import MODES, Pair, Writers

D, E = describe("d", 2), describe("e", 3)
FIRM_S = Limits().firm_ttl_s


@pytest.fixture
def lead() -> Lead:
    made = Lead()
    made.admit(D)
    made.admit(E)
    return made


def soft_in(lead: Lead, made: Any) -> float | None:
    """Returns the time until the lease of a hand-over is soft, in seconds; None while it is claimed."""
    return lead.node.lease_times(lead.state.send.leases.get(made.lease.id)).soft_in_s


def opening(made: Any, number: int = 1) -> AccessOpening:
    return AccessOpening(access_id(number), made.token, claim(32))


def renew(lead: Lead, made: Any, ttl_s: float = 20.0, principal: str = "router", **fields: Any) -> None:
    lead.call(lambda c: RenewLeases(c, (LeaseRef(made.lease.id),), ttl_s, **fields), principal)


def test_a_lease_is_firm_for_its_firm_time_and_then_soft(lead: Lead) -> None:
    made = lead.finish()
    assert soft_in(lead, made) == FIRM_S
    lead.tick(FIRM_S - 0.5)
    assert soft_in(lead, made) == pytest.approx(0.5)
    assert lead.state.pool.pins.soft == [0]
    lead.tick(0.5)
    assert soft_in(lead, made) == 0
    assert lead.state.pool.pins.soft == [2]


@pytest.mark.parametrize(("asked_s", "firm_s"), [(0.0, 0.0), (7.0, 7.0), (1e9, 3_600.0)])
def test_a_hand_over_may_say_how_long_it_is_firm(lead: Lead, asked_s: float, firm_s: float) -> None:
    assert soft_in(lead, lead.finish(firm_ttl_s=asked_s)) == firm_s


@pytest.mark.parametrize("asked_s", [-1.0, float("nan")])
def test_a_firm_time_is_not_negative(lead: Lead, asked_s: float) -> None:
    with refused(Reason.TTL_INVALID, InvalidRequest):
        lead.finish(firm_ttl_s=asked_s)


def test_a_lease_is_claimed_while_it_is_read(lead: Lead) -> None:
    made = lead.finish()
    lead.opened(D, opening(made))
    assert soft_in(lead, made) is None
    lead.tick(20.0)
    assert lead.state.pool.pins.soft == [0]


def test_a_soft_lease_that_is_opened_is_claimed(lead: Lead) -> None:
    made = lead.finish()
    lead.tick(FIRM_S + 1)
    lead.opened(D, opening(made))
    assert soft_in(lead, made) is None
    assert lead.state.pool.pins.soft == [0]


def test_a_lease_is_claimed_while_a_reader_waits_for_it(lead: Lead) -> None:
    made = lead.finish(after_step=1)
    lead.open(D, opening(made))
    assert soft_in(lead, made) is None
    lead.tick(lead.state.limits.open_wait_s)  # the reader's wait ends
    assert soft_in(lead, made) == FIRM_S


def test_a_reader_that_waits_before_the_hand_over_claims_it(lead: Lead) -> None:
    known = Lead()
    token = known.finish(lease_id="l-early").token
    lead.open(D, AccessOpening(access_id(), token, claim(32)))
    made = lead.finish(after_step=1, lease_id="l-early")
    assert soft_in(lead, made) is None


def test_a_reader_that_is_refused_claims_nothing(lead: Lead) -> None:
    made = lead.finish()
    lead.tick(1.0)
    lead.opened(D, AccessOpening(access_id(), made.token, claim(32, first=7)))
    assert soft_in(lead, made) == FIRM_S - 1


def test_a_lease_whose_last_claimer_failed_is_firm_anew(lead: Lead) -> None:
    made = lead.finish(consumers=2)
    lead.opened(D, opening(made, 1))
    lead.opened(E, opening(made, 2))
    lead.tick(10.0)
    lead.close(D, 1)
    assert soft_in(lead, made) is None
    lead.close(E, 2)
    assert soft_in(lead, made) == FIRM_S
    lead.tick(FIRM_S)
    assert lead.state.pool.pins.soft == [2]


def test_a_lease_whose_reader_is_done_is_firm_anew_for_the_next_one(lead: Lead) -> None:
    made = lead.finish(consumers=2)
    lead.opened(D, opening(made))
    lead.tick(10.0)
    assert lead.settle(D).valid
    assert soft_in(lead, made) == FIRM_S


def test_a_lease_whose_reader_dies_is_firm_anew(lead: Lead) -> None:
    made = lead.finish(on_abort=OnAbort.KEEP)
    lead.opened(D, opening(made))
    lead.feed(events.PeerSilent(key_of(D)))
    lead.tick(lead.state.limits.peer_grace_s)
    assert soft_in(lead, made) == FIRM_S


def test_a_renewal_by_another_makes_it_firm_for_the_time_renewed(lead: Lead) -> None:
    made = lead.finish()
    lead.tick(FIRM_S + 1)
    renew(lead, made)
    assert soft_in(lead, made) == 20.0
    assert lead.state.pool.pins.soft == [0]


def test_a_renewal_for_an_access_is_no_claim_beside_it(lead: Lead) -> None:
    made = lead.finish()
    lead.opened(D, opening(made))
    renew(lead, made, principal="d", for_access=True)
    lead.close(D)
    assert soft_in(lead, made) == FIRM_S


def test_a_renewal_beside_an_access_outlasts_it(lead: Lead) -> None:
    made = lead.finish()
    lead.opened(D, opening(made))
    renew(lead, made)
    lead.close(D)
    assert soft_in(lead, made) == 20.0


def test_a_renewal_by_the_engine_itself_claims_nothing(lead: Lead) -> None:
    made = lead.finish()
    renew(lead, made, principal="engine")
    assert soft_in(lead, made) == FIRM_S


def test_a_renewal_that_is_only_validated_claims_nothing(lead: Lead) -> None:
    made = lead.finish()
    renew(lead, made, validate_only=True)
    assert soft_in(lead, made) == FIRM_S


def test_a_lease_that_is_over_is_neither(lead: Lead) -> None:
    made = lead.finish()
    lead.tick(FIRM_S)
    lead.call(lambda c: events.ReleaseLease(c, LeaseRef(made.lease.id)))
    assert soft_in(lead, made) is None
    assert lead.state.pool.pins.soft == [0]
    assert not list(lead.state.send.soft_leases.oldest())


def test_blocks_that_somebody_else_holds_are_not_soft(lead: Lead) -> None:
    lead.finish(32, (0, 1), key=b"1" * 16)
    lead.tick(FIRM_S)
    lead.finish(32, (1, 2), key=b"2" * 16)
    assert lead.state.pool.pins.soft == [1]
    lead.tick(FIRM_S)
    assert lead.state.pool.pins.soft == [3]


def lease_of(pair: Pair) -> float | None:
    """Returns the time until the lease of the only push is soft, in seconds; None while it is claimed."""
    (lease,) = pair.p.state.send.leases
    return pair.p.node.lease_times(lease).soft_in_s


def test_a_push_without_a_destination_is_soft_once_all_parts_are_there() -> None:
    pair = Pair()
    pair.finish(32, (1,), last=False)
    assert lease_of(pair) is None
    pair.tick(20.0)
    pair.finish(32, (2,))
    assert lease_of(pair) == FIRM_S
    pair.tick(FIRM_S)
    assert lease_of(pair) == 0


@MODES
def test_a_push_with_a_destination_is_claimed_until_that_failed(writers: Writers) -> None:
    pair = Pair(writers)
    pair.finish(32, (1, 2))
    pair.tick(FIRM_S)
    pair.register(pair.reserve(32, (3, 4)).token)
    assert lease_of(pair) is None
    first, scope = next(iter(pair.d.state.transfers)).id, events.CancelScope.THIS_SIDE
    pair.call(pair.d, lambda c: events.CancelTransfer(c, first, scope=scope))
    pair.moved()
    assert lease_of(pair) == FIRM_S


def test_a_lease_of_which_nothing_is_known_costs_no_memory() -> None:
    lead = Lead()
    lead.checked = False
    for number in range(3_000):
        made = lead.finish(key=number.to_bytes(16, "big"), ttl_s=5.0)
        lead.call(lambda c, made=made: events.ReleaseLease(c, LeaseRef(made.lease.id)))  # type: ignore[misc]
    kept = vars(lead.state.send.soft_leases)
    assert sum(len(kept[name]) for name in ("firm_until", "_soft", "_by_end", "_by_age")) < 1_100
