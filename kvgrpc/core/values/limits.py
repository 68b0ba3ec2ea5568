"""Limits and defaults, in one place. docs/protocol.md shows the same table; GetCapabilities serves it."""

from dataclasses import dataclass

from kvgrpc.errors import InvalidRequest, OutOfRange, Reason, invalid

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1


@dataclass(frozen=True)
class Limits:
    """All durations in seconds."""

    lease_ttl_s: float = 30.0
    """Three renewals fit, so that one lost renewal never ends a lease."""
    firm_ttl_s: float = 3.0
    """While nobody has claimed a lease, it is kept for at least this long after its hand-over."""
    lease_cap_s: float = 3_600.0
    """However often it is renewed, a lease is over by then. A client that waits leaves its queue long before; what no
    request waits for any more is renewed by mistake only.
    """
    queue_timeout_s: float = 30.0
    transfer_timeout_s: float = 30.0
    """How long the bytes of a transfer may take, without the time that their number gives them."""
    least_bytes_per_s: float = 64.0 * 1024 * 1024
    """Bytes per second of one rank, at which a transfer is given time for its bytes: a path of 10 Gbit/s has as much
    left for each of sixteen transfers at once.
    """
    settle_timeout_s: float = 5.0
    registration_timeout_s: float = 120.0
    announce_wait_s: float = 10.0
    """How long a destination waits for a push of which an engine that expects pushes says nothing."""
    peer_grace_s: float = 10.0
    connect_timeout_s: float = 10.0
    wait_s: float = 60.0
    """The longest that a call waits for a transfer or for news."""
    open_wait_s: float = 5.0
    """How long an OpenAccess waits for a lease that is not announced yet or a step that is not over."""
    idempotency_s: float = 60.0
    blocks_per_request: int = 65_536
    message_bytes: int = 4 * 1024 * 1024
    leases: int = 200_000
    allocations: int = 65_536
    """Allocations of a pool that this server manages, which hold a block."""
    allocation_ttl_s: float = 600.0
    """Of an allocation that states no TTL and is not of the engine's session."""
    transfers: int = 50_000
    in_flight_bytes: int = 256 * 1024 * 1024
    """While each rank has that many bytes in flight, all others wait their turn, by priority. No posting is larger."""
    transfer_history: int = 4_096
    """Acknowledged or unowned transfers that are kept after their end, and changes kept for watches to resume."""
    idempotency_keys: int = 200_000
    accesses: int = 200_000
    """Accesses of peers, with those whose verdict is still kept."""
    accesses_per_peer: int = 50_000
    """The same, of one life of a peer."""
    closed_early_per_peer: int = 1_024
    """Accesses of one life of a peer that were closed before they were opened: each is remembered for the registration
    timeout."""
    peers: int = 1_024
    """Lives of other engines that are not dead."""
    new_peers: int = 128
    """Peers among them that introduced themselves and have not brought up their liveness stream: the first goes first.
    """
    registrations: int = 64
    """Destinations of one push, with those that failed."""
    tombstones: int = 65_536
    """Keys that were cancelled or whose push is over, WRITE grants of pushes that are over, and leases refused before
    their readers came: so many of each, for the registration timeout."""
    ended_leases: int = 65_536
    """Ended leases that are remembered, so that a late caller learns how they ended."""
    kept_bytes: int = 256 * 1024 * 1024
    """What the calls of all callers keep, without the attached engine's; and as much, what the calls of all peers do.
    """
    kept_bytes_per_caller: int = 64 * 1024 * 1024
    """The same, of one principal, of one connection where callers have no principal, and of one life of a peer."""
    engine_kept_bytes: int = 4 * 1024 * 1024 * 1024
    """What the calls of the attached engine's session keep."""
    remembered_bytes: int = 32 * 1024 * 1024
    """What is remembered of each kind of thing that is over: leases, transfers, tombstones, tensors."""
    request_ttl_s: float = 600.0
    """A scheduler that says nothing for so long has gone: its requests are aborted."""
    renewals_per_call: int = 10_000
    standing: int = 8_192
    """Streams, and calls that wait as long as their caller likes, of all connections."""
    standing_per_connection: int = 1_024
    calls: int = 8_192
    """Calls under way, of all connections, without those that wait as long as their caller likes."""
    calls_per_connection: int = 1_024
    dials: int = 1_024
    """Handshakes with other engines that callers cause within the connect timeout; counted apart, renewals there."""
    dials_per_connection: int = 256
    connections: int = 2_048
    """To the gRPC port, of callers and peers: one more is closed at once."""
    quarantine_share: float = 0.5
    """Share of a group's blocks: when more are in quarantine, no new work is taken."""
    rekey_interval_s: float = 60.0
    """From the end of one re-key to the next: each ends the transfers of the moment."""


def granted_ttl(asked_s: float | None, limits: Limits) -> float:
    """The TTL that is granted for the one asked for: the default for None, clamped to the cap.

    Raises InvalidRequest (TTL_INVALID) for zero, negative or not a number.
    """
    if asked_s is None:
        return limits.lease_ttl_s
    if not asked_s > 0:
        raise InvalidRequest(Reason.TTL_INVALID, f"a TTL is positive; got {asked_s:g} s")
    return min(asked_s, limits.lease_cap_s)


def granted_firm_ttl(asked_s: float | None, limits: Limits) -> float:
    """The firm time that is granted for the one asked for: the default for None, clamped to the cap; 0: none.

    Raises InvalidRequest (TTL_INVALID) for negative or not a number.
    """
    if asked_s is None:
        return limits.firm_ttl_s
    if not asked_s >= 0:
        raise InvalidRequest(Reason.TTL_INVALID, f"a firm TTL is not negative; got {asked_s:g} s")
    return min(asked_s, limits.lease_cap_s)


def bytes_timeout(nbytes: int, limits: Limits) -> float:
    """How long a transfer of so many bytes of a rank may take where its caller does not say. It grows up to the cap."""
    by_bytes = limits.transfer_timeout_s + nbytes / limits.least_bytes_per_s
    return max(min(by_bytes, limits.lease_cap_s), limits.transfer_timeout_s)


def granted_timeout(asked_s: float | None, default_s: float, limits: Limits) -> float:
    """The timeout that is granted for the one asked for: the default for None, clamped to the lease cap.

    Raises InvalidRequest (INVALID_FIELD) for zero, negative or not a number.
    """
    if asked_s is None:
        return default_s
    if not asked_s > 0:
        raise invalid("timeout", f"is positive; got {asked_s:g} s")
    return min(asked_s, limits.lease_cap_s)


def check_renewals(count: int, limits: Limits) -> None:
    """Raises OutOfRange (LIMIT_EXCEEDED) for too many rows of one call."""
    most = limits.renewals_per_call
    if count > most:
        raise OutOfRange(Reason.LIMIT_EXCEEDED, f"at most {most} leases in one call", metadata={"limit": str(most)})
