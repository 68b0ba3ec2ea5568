"""Keys for leases of a lead, and the release of such a lease."""

from typing import Any

from kvgrpc.core.events import LeaseRef, ReleaseLease
from kvgrpc.core.values.limits import Limits
from tests.core.nodes import Lead, describe

LIMITS = Limits(lease_ttl_s=30.0, lease_cap_s=100.0)
D = describe("d", 2)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def release(lead: Lead, **ref: Any) -> Any:
    return lead.call(lambda c: ReleaseLease(c, LeaseRef(**ref)))
