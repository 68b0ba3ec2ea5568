"""Makes openings of leases by the peers of a lead, and looks up leases."""

from typing import Any

from kvgrpc.core.events import Opened
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.leases import LeaseState
from tests.core.nodes import Lead, access_id, claim, describe

D = describe("d", 2)
E = describe("e", 3)


def opening(token: bytes, number: int = 1) -> AccessOpening:
    return AccessOpening(access_id(number), token, claim(32))


def opened(lead: Lead, token: bytes, number: int = 1, peer: Any = D) -> None:
    (row,) = lead.opened(peer, opening(token, number))
    assert isinstance(row, Opened)


def lease_state(lead: Lead, made: Any) -> LeaseState:
    state: LeaseState = lead.state.send.leases.get(made.lease.id).state
    return state
