"""Makes leases without a node."""

from typing import Any

from kvgrpc.core.tables.leases import Lease
from kvgrpc.core.values.grants import OnAbort
from kvgrpc.core.values.limits import Limits
from tests.core.nodes import content, ids

LIMITS = Limits(lease_ttl_s=30.0, lease_cap_s=100.0)


def lease(lease_id: str = "l-1", now: float = 0.0, ttl_s: float = 30.0, **changes: Any) -> Lease:
    fields: dict[str, Any] = {
        "id": lease_id,
        "blocks": (ids(3, 4),),
        "content": content(32),
        "granted": now,
        "ttl_s": ttl_s,
        "deadline": now + ttl_s,
        "cap": now + LIMITS.lease_cap_s,
        "firm_ttl_s": 3.0,
        "firm_until": now + 3.0,
        "consumers": 1,
        "on_abort": OnAbort.RELEASE,
        "owner": "engine",
    }
    return Lease(**{**fields, **changes})
