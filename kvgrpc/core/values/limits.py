"""Limits and defaults. docs/protocol.md shows the same table; GetCapabilities serves it."""

from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import InvalidRequest, Reason, invalid, too_many

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1
MESSAGE_BYTES = 4 * 1024 * 1024
"""Maximum size of one message, in bytes, unless a server is set or states otherwise: gRPC's own default."""


@dataclass(frozen=True)
class Limits:
    """Limits and defaults of an engine. All durations are in seconds."""

    lease_ttl_s: float = 30.0
    """TTL of a lease by default. Three renewals fit, so that one lost renewal never ends a lease."""
    firm_ttl_s: float = 3.0
    """Minimum time for which an unclaimed lease is kept after its hand-over."""
    lease_cap_s: float = 3_600.0
    """Maximum time for which a lease can be renewed. A client that waits leaves its queue long before. A lease that
    outlives all its requests is only renewed by mistake.
    """
    queue_timeout_s: float = 30.0
    transfer_timeout_s: float = 30.0
    """Base time for the bytes of a transfer, without the time added for their number."""
    least_bytes_per_s: float = 64.0 * 1024 * 1024
    """Bytes per second of one rank that a transfer's time for its bytes assumes. A path of 10 Gbit/s leaves as much for
    each of sixteen concurrent transfers.
    """
    settle_timeout_s: float = 5.0
    registration_timeout_s: float = 120.0
    announce_wait_s: float = 10.0
    """Time for which a destination waits for a push that an engine which expects pushes has not announced."""
    peer_grace_s: float = 10.0
    connect_timeout_s: float = 10.0
    wait_s: float = 60.0
    """Maximum time for which a call waits for a transfer or for news."""
    open_wait_s: float = 5.0
    """Maximum time for which an OpenAccess waits for a lease that is not announced or a step that is not over."""
    idempotency_s: float = 60.0
    blocks_per_request: int = 65_536
    message_bytes: int = MESSAGE_BYTES
    leases: int = 200_000
    allocations: int = 65_536
    """Maximum number of allocations that hold a block, in a pool that this server manages."""
    allocation_ttl_s: float = 600.0
    """TTL of an allocation that states none and does not belong to the engine's session."""
    transfers: int = 50_000
    in_flight_bytes: int = 256 * 1024 * 1024
    """Bytes in flight per rank above which all other moves wait their turn, by priority. No posting is larger."""
    transfer_history: int = 4_096
    """Number of acknowledged or unowned transfers kept after their end, and of changes kept for watches to resume."""
    idempotency_keys: int = 200_000
    accesses: int = 200_000
    """Maximum number of accesses of peers, including ended ones whose verdict is still kept."""
    accesses_per_peer: int = 50_000
    """Maximum number of accesses of one life of a peer."""
    closed_early_per_peer: int = 1_024
    """Maximum number of accesses per life of a peer that were closed before being opened, in a registration timeout."""
    peers: int = 1_024
    """Maximum number of lives of other engines that are not dead."""
    new_peers: int = 128
    """Maximum number of peers that introduced themselves and have no liveness stream yet. One more ends the first."""
    registrations: int = 64
    """Maximum number of destinations of one push, including failed ones."""
    tombstones: int = 65_536
    """Maximum number each of cancelled or ended keys, WRITE grants of ended pushes, and leases refused before their
    readers came. Each is remembered for the registration timeout.
    """
    ended_leases: int = 65_536
    """Number of ended leases that are remembered, so that a late caller learns how they ended."""
    kept_bytes: int = 256 * 1024 * 1024
    """Maximum bytes kept for the calls of all callers but the attached engine; as much again for those of all peers."""
    kept_bytes_per_caller: int = 64 * 1024 * 1024
    """Maximum bytes kept for one principal, one connection of callers without a principal, or one life of a peer."""
    tenant_share: float = 0.5
    """Part that one tenant may have of each limit for all callers: of kept bytes, leases, transfers, allocations, calls
    under way, and streams and waits.
    """
    engine_kept_bytes: int = 4 * 1024 * 1024 * 1024
    """Maximum bytes kept for the calls of the attached engine's session."""
    remembered_bytes: int = 32 * 1024 * 1024
    """Maximum bytes remembered of things that are over: of leases, of transfers, of unanswered closes, and of each
    table that `tombstones` bounds.
    """
    request_ttl_s: float = 600.0
    """Time of silence after which a scheduler counts as gone, and its requests are aborted."""
    renewals_per_call: int = 10_000
    standing: int = 8_192
    """Maximum number of streams and of calls that wait as long as their caller likes, over all connections."""
    standing_per_connection: int = 1_024
    calls: int = 8_192
    """Maximum number of calls in flight over all connections, without those that wait as long as their caller likes."""
    calls_per_connection: int = 1_024
    streams_per_connection: int = 128
    """Maximum number of open gRPC calls of one connection, streams included. Its library holds back further calls."""
    dials: int = 1_024
    """Maximum number of handshakes that callers cause within the connect timeout, and of renewals at peers, each."""
    dials_per_connection: int = 256
    connections: int = 2_048
    """Maximum number of connections of callers and peers to the gRPC port. One more is closed at once."""
    quarantine_share: float = 0.5
    """Share of a group's blocks in quarantine above which no new work is taken."""
    rekey_interval_s: float = 60.0
    """Minimum time from the end of one re-key to the next: each re-key ends the transfers in flight."""

    def of_tenant(self, most: int) -> int:
        """Returns what one tenant may have of a limit for all callers: at least 1."""
        return max(int(most * self.tenant_share), 1)


def granted_ttl(asked_s: float | None, limits: Limits) -> float:
    """Returns the TTL to grant: the one asked for, clamped to the cap, or the default for None.

    Raises InvalidRequest (TTL_INVALID) for zero, a negative value or NaN.
    """
    if asked_s is None:
        return limits.lease_ttl_s
    if not asked_s > 0:
        raise InvalidRequest(Reason.TTL_INVALID, f"a TTL is positive; got {asked_s:g} s")
    return min(asked_s, limits.lease_cap_s)


def granted_firm_ttl(asked_s: float | None, limits: Limits) -> float:
    """Returns the firm time to grant: the one asked for, clamped to the cap, or the default for None; 0: none.

    Raises InvalidRequest (TTL_INVALID) for a negative value or NaN.
    """
    if asked_s is None:
        return limits.firm_ttl_s
    if not asked_s >= 0:
        raise InvalidRequest(Reason.TTL_INVALID, f"a firm TTL is not negative; got {asked_s:g} s")
    return min(asked_s, limits.lease_cap_s)


def bytes_timeout(nbytes: int, limits: Limits) -> float:
    """Returns the default timeout for a transfer of `nbytes` bytes per rank. The timeout grows with the bytes, up to
    the cap.
    """
    by_bytes = limits.transfer_timeout_s + nbytes / limits.least_bytes_per_s
    return max(min(by_bytes, limits.lease_cap_s), limits.transfer_timeout_s)


def granted_timeout(asked_s: float | None, default_s: float, limits: Limits) -> float:
    """Returns the timeout to grant: the one asked for, clamped to the lease cap, or the default for None.

    Raises InvalidRequest (INVALID_FIELD) for zero, a negative value or NaN.
    """
    if asked_s is None:
        return default_s
    if not asked_s > 0:
        raise invalid("timeout", f"is positive; got {asked_s:g} s")
    return min(asked_s, limits.lease_cap_s)


def check_renewals(count: int, limits: Limits) -> None:
    """Raises OutOfRange (LIMIT_EXCEEDED) if one call has too many rows."""
    if count > (most := limits.renewals_per_call):
        raise too_many(f"at most {most} leases in one call", most)
