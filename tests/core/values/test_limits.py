"""TTLs and timeouts are positive and clamped, and the granted value is returned."""

import math
from dataclasses import replace

import pytest

from kvgrpc.core.values.limits import Limits, bytes_timeout, granted_timeout, granted_ttl
from kvgrpc.errors import InvalidRequest, Reason
from tests.core.nodes import refused

LIMITS = Limits(lease_ttl_s=30.0, lease_cap_s=600.0)


def test_the_defaults_are_the_documented_ones() -> None:
    limits = Limits()
    assert (limits.lease_ttl_s, limits.lease_cap_s, limits.registration_timeout_s) == (30.0, 3_600.0, 120.0)
    assert (limits.queue_timeout_s, limits.transfer_timeout_s, limits.settle_timeout_s) == (30.0, 30.0, 5.0)
    assert (limits.peer_grace_s, limits.idempotency_s) == (10.0, 60.0)
    assert limits.least_bytes_per_s == 64 * 1024 * 1024
    assert (limits.blocks_per_request, limits.message_bytes) == (65_536, 4 * 1024 * 1024)


def test_no_ttl_takes_the_default() -> None:
    assert granted_ttl(None, LIMITS) == 30.0
    assert granted_timeout(None, 5.0, LIMITS) == 5.0


@pytest.mark.parametrize("asked", [0.001, 30.0, 600.0])
def test_what_is_asked_is_granted(asked: float) -> None:
    assert granted_ttl(asked, LIMITS) == granted_timeout(asked, 5.0, LIMITS) == asked


@pytest.mark.parametrize("asked", [600.1, 1e300, math.inf])
def test_what_is_past_the_cap_is_clamped(asked: float) -> None:
    assert granted_ttl(asked, LIMITS) == granted_timeout(asked, 5.0, LIMITS) == 600.0


def test_bytes_have_time_by_their_number_up_to_the_cap() -> None:
    limits = Limits(transfer_timeout_s=30.0, least_bytes_per_s=1e6, lease_cap_s=600.0)
    assert bytes_timeout(0, limits) == 30.0
    assert bytes_timeout(40_000_000, limits) == 70.0
    assert bytes_timeout(10**12, limits) == 600.0
    assert bytes_timeout(10**12, replace(limits, lease_cap_s=5.0)) == 30.0


@pytest.mark.parametrize("asked", [0.0, -0.0, -1.0, -math.inf, math.nan])
def test_zero_negative_and_nothing_at_all_are_refused(asked: float) -> None:
    with refused(Reason.TTL_INVALID, InvalidRequest):
        granted_ttl(asked, LIMITS)
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        granted_timeout(asked, 5.0, LIMITS)
