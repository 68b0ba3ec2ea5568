"""The table of metrics: one row for each family. docs/metrics.md shows it."""

from enum import Enum
from functools import partial

from kvgrpc.core.values.records import dataclass


class MetricKind(Enum):
    """The kind of a family."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Family:
    """One family: its name without the `_total` of a counter, its kind, its meaning and the names of its labels."""

    name: str
    kind: MetricKind
    meaning: str
    labels: tuple[str, ...] = ()


FAMILIES: list[Family] = []
"""All families, in the order of the docs."""


def _add(kind: MetricKind, name: str, meaning: str, *labels: str) -> Family:
    row = Family(name, kind, meaning, labels)
    FAMILIES.append(row)
    return row


_counter, _gauge, _histogram = (partial(_add, kind) for kind in MetricKind)

# Transfers that ended.
TRANSFERS = _counter("kvgrpc_transfers", "Transfers that ended.", "direction", "mode", "outcome")
TRANSFER_FAILURES = _counter("kvgrpc_transfer_failures", "Transfers that failed, by reason.", "direction", "reason")
TRANSFER_SECONDS = _histogram(
    "kvgrpc_transfer_duration_seconds", "Time from the start of a transfer to its end.", "direction", "mode"
)
PHASE_SECONDS = _histogram(
    "kvgrpc_transfer_phase_seconds", "Time that a transfer spent in one phase.", "direction", "phase"
)
TRANSFER_BYTES = _histogram("kvgrpc_transfer_bytes", "Size of transfers that were received.", "data_path")
RECEIVED_BYTES = _counter("kvgrpc_received_bytes", "Bytes that were received.")
SENT_BYTES = _counter("kvgrpc_sent_bytes", "Bytes that this engine's ranks wrote to others.")
SLOW_PATHS = _counter(
    "kvgrpc_slow_path_transfers",
    "Received transfers whose data path was not the first one of the setting.",
    "data_path",
)

# Transfers that are not over.
UNFINISHED = _gauge("kvgrpc_transfers_unfinished", "Transfers that are not over.", "direction", "state")
WAITING = _gauge("kvgrpc_transfers_waiting", "Transfers that wait, by the condition that they wait for.", "for")
OLDEST_TRANSFER = _gauge("kvgrpc_oldest_transfer_age_seconds", "Age of the oldest transfer that is not over.")
PROGRESS_AGE = _gauge("kvgrpc_progress_age_seconds", "Time since the movers made progress, while bytes are in flight.")
ACCESSES = _gauge("kvgrpc_accesses_open", "Accesses that are open with peers, in both directions.")

# Leases.
LEASES = _gauge("kvgrpc_leases", "Live leases: firm, soft, or claimed by a reader.", "state")
LEASE_AGES = _histogram("kvgrpc_lease_age_seconds", "Ages of the live leases, at the scrape.")
OLDEST_LEASE = _gauge("kvgrpc_oldest_lease_age_seconds", "Age of the oldest live lease.")
LEASE_ENDS = _counter("kvgrpc_lease_ends", "Leases that ended.", "state")
RECLAIMS_IN_VAIN = _counter("kvgrpc_reclaims_in_vain", "Reclaimed leases that a reader came for too late.")
RECLAIMED_CLAIMS = _counter("kvgrpc_reclaimed_claims", "Leases that older requests took from waiting readers.")
LACKING = _gauge("kvgrpc_lacking_requests", "Requests of this engine that lack blocks.")
WAITING_READERS = _gauge("kvgrpc_waiting_readers", "Leases whose readers wait for blocks of their own.")

# Blocks.
BLOCKS = _gauge(
    "kvgrpc_blocks",
    "Blocks of each block space: free, allocated and not pinned, pinned, quarantined.",
    "space",
    "state",
)
SOFT_BLOCKS = _gauge("kvgrpc_reclaimable_blocks", "Blocks that only soft leases hold.", "space")
QUARANTINE_AGE = _gauge("kvgrpc_quarantine_age_seconds", "Age of the oldest quarantine.")

# Named tensors.
STORE_PAGES = _gauge("kvgrpc_store_pages", "Pages of the store of named tensors.", "state")
STORE_TENSORS = _gauge("kvgrpc_store_tensors", "Named tensors that the store knows.", "state")
STORE_WAITS = _gauge("kvgrpc_store_waits", "Calls that wait for a named tensor, or for pages.", "for")

# Peers and callers.
PEERS = _gauge("kvgrpc_peers", "Lives of other engines that this lead knows.", "state")
PEER_PATHS = _gauge("kvgrpc_peer_paths", "Pairs of ranks of this engine and of others, by data path.", "data_path")
DENIED = _counter("kvgrpc_denied_calls", "Calls that were refused because of their caller.", "reason")
CALLS_WAITING = _gauge("kvgrpc_calls_waiting", "Calls that wait for their turn in the call queue.")
CALLS_BACKLOG = _gauge("kvgrpc_calls_backlog", "Calls that gRPC has and has not handed over yet.")
CALLS_REFUSED = _counter("kvgrpc_calls_refused", "Calls that were refused because more come than this server serves.")
CALL_SECONDS = _histogram(
    "rpc_server_call_duration_seconds",
    "Time that a call took at this lead, whatever carried it.",
    "rpc_system_name",
    "rpc_method",
    "rpc_response_status_code",
)

# The fleet.
FLEET_PUBLISHED = _gauge("kvgrpc_fleet_published", "1 while the registry has the entry of this engine's life.")
FLEET_ENTRIES = _gauge("kvgrpc_fleet_entries", "Entries of the registry, at kvgrpc fleet.", "state")
FLEET_SILENCE = _gauge("kvgrpc_fleet_registry_silence_seconds", "Time since the registry broke off, at kvgrpc fleet.")
FLEET_REFUSED = _counter("kvgrpc_fleet_refused_entries", "Entries that were not usable, at kvgrpc fleet.")
FLEET_PICKS = _counter(
    "kvgrpc_fleet_picks", "Choices for requests, at kvgrpc fleet: a pair, a decode engine alone, or none.", "outcome"
)

# The process.
KEPT_BYTES = _gauge("kvgrpc_kept_bytes", "Bytes kept for what calls created, by who pays.", "share")
KEPT_BYTES_MAX = _gauge("kvgrpc_kept_bytes_limit", "Maximum of kvgrpc_kept_bytes.", "share")
KEPT_BY_KIND = _gauge("kvgrpc_kept_kind_bytes", "Bytes kept, by kind.", "kind")
ADMISSION = _gauge("kvgrpc_admission", "1 for the present state of admission, 0 for all others.", "state")
UPTIME = _gauge("kvgrpc_life_age_seconds", "Age of the present incarnation.")
DEFECTS = _counter("kvgrpc_defects", "Lives of the engine that a defect of kvgrpc ended.")
LOOP_LAG = _histogram("kvgrpc_event_loop_lag_seconds", "Delay of a timer of the event loop, measured every second.")
CERTIFICATE_END = _gauge(
    "kvgrpc_tls_certificate_not_after_seconds", "End of the certificate in use, in seconds since the Unix epoch."
)
TLS_BROKEN = _gauge("kvgrpc_tls_files_unusable", "1 while the TLS files as they are now are not in use.")
BUILD_INFO = _gauge("kvgrpc_build_info", "Always 1; the labels say what runs here.", "version", "grpc", "protocol")
