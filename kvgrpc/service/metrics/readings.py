"""State of a lead that metrics show, read on the event loop when Prometheus asks."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import grpc

from kvgrpc.core.state.node_state import NodeState
from kvgrpc.core.tables.ledger import LedgerShare
from kvgrpc.core.tables.peers import PeerState
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.values.limits import PROTOCOL_MAX
from kvgrpc.errors import PreconditionFailed, Reason, Unavailable
from kvgrpc.service.admission import admission
from kvgrpc.service.call_queue import CallQueue
from kvgrpc.service.histogram import AGE_BOUNDS_S, Histogram
from kvgrpc.service.lead import Lead
from kvgrpc.service.metrics import families as of
from kvgrpc.service.metrics.families import Family
from kvgrpc.service.metrics.records import LoopLag, TransferRecords
from kvgrpc.service.tensors.store_parts import StoreStatus
from kvgrpc.tls import Tls
from kvgrpc.v1 import handshake_pb2

DENIALS = frozenset({Reason.NOT_AUTHENTICATED, Reason.ROLE_MISSING, Reason.POLICY_DENIED})
Labels = tuple[str, ...]
Reading = tuple[Family, Iterable[tuple[Labels, float | Histogram]]]
"""A family with the value of each combination of its labels."""


class HasStatus(Protocol):
    """The store of named tensors of one life."""

    def status(self) -> StoreStatus: ...


class HasStore(Protocol):
    """The lead's named tensors."""

    @property
    def store(self) -> HasStatus:
        """The store of this life. Raises PreconditionFailed if there is none, Unavailable if there is no pool."""


def one(family: Family, value: float | Histogram) -> Reading:
    """Returns the reading of a family without labels."""
    return family, [((), value)]


def by(family: Family, values: Mapping[str, float]) -> Reading:
    """Returns the reading of a family with one label."""
    return family, [((label,), value) for label, value in values.items()]


def queued(queue: CallQueue) -> Iterator[Reading]:
    """Yields the readings of a server's call queue."""
    yield one(of.CALLS_WAITING, queue.waiting)
    yield one(of.CALLS_BACKLOG, queue.backlog())
    yield one(of.CALLS_REFUSED, queue.refused)


class Metrics:
    """All metrics of a lead."""

    def __init__(self, lead: Lead, staging: HasStore, tls: Tls | None) -> None:
        self._lead, self._staging, self._tls = lead, staging, tls
        self.transfers = TransferRecords(lead.config.data_paths)
        self.lag = LoopLag()

    def read(self) -> Iterator[Reading]:
        """Yields all readings. Call it on the event loop."""
        self._lead.runner.advance()
        state = self._lead.runner.node.state
        yield from self._ended_transfers(state)
        yield from self._open_transfers(state)
        yield from self._leases(state)
        yield from _blocks(state)
        yield from self._tensors()
        yield from self._peers_and_callers(state)
        yield from self._fleet()
        yield from self._process(state)

    def _ended_transfers(self, state: NodeState) -> Iterator[Reading]:
        records = self.transfers
        yield of.TRANSFERS, records.ends.items()
        yield of.TRANSFER_FAILURES, records.failures.items()
        yield of.TRANSFER_SECONDS, records.seconds.items()
        yield of.PHASE_SECONDS, records.phases.items()
        yield of.TRANSFER_BYTES, records.sizes.items()
        yield one(of.RECEIVED_BYTES, state.moves.bytes_received)
        yield one(of.SENT_BYTES, state.moves.bytes_sent)
        yield of.SLOW_PATHS, records.slow.items()

    def _open_transfers(self, state: NodeState) -> Iterator[Reading]:
        unfinished = state.transfers.unfinished()
        states = Counter((transfer.direction.value, transfer.state.value) for transfer in unfinished)
        waits = Counter(transfer.waiting_for for transfer in unfinished if transfer.waiting_for)
        oldest = unfinished[0].created if unfinished else state.now
        yield of.UNFINISHED, states.items()
        yield by(of.WAITING, waits)
        yield one(of.OLDEST_TRANSFER, state.now - oldest)
        yield one(of.PROGRESS_AGE, self._lead.progress_age_s())
        yield one(of.ACCESSES, sum(map(self._lead.runner.node.open_accesses, state.peers.lives.values())))

    def _leases(self, state: NodeState) -> Iterator[Reading]:
        send, now = state.send, state.now
        ages = Histogram(AGE_BOUNDS_S)
        for lease in send.leases:
            ages.observe(now - lease.granted)
        firm, soft = len(send.soft_leases.firm_until), len(send.soft_leases)
        yield by(of.LEASES, {"firm": firm, "soft": soft, "claimed": len(send.leases) - firm - soft})
        yield one(of.LEASE_AGES, ages)
        yield one(of.OLDEST_LEASE, now - next((lease.granted for lease in send.leases), now))
        yield by(of.LEASE_ENDS, {how.value: count for how, count in send.leases.ends.items()})
        yield one(of.RECLAIMS_IN_VAIN, send.soft_leases.reclaimed_in_vain)
        yield one(of.RECLAIMED_CLAIMS, send.soft_leases.reclaimed_claims)
        yield one(of.LACKING, len(send.lacking.rows(now)))
        yield one(of.WAITING_READERS, sum(1 for _ in self._lead.runner.node.weak_claims.waiting()))

    def _tensors(self) -> Iterator[Reading]:
        try:
            store = self._staging.store.status()
        except (PreconditionFailed, Unavailable):
            return
        free = store.page_count - store.used_page_count - store.reserved_page_count
        pages = {"free": free, "used": store.used_page_count, "reserved": store.reserved_page_count}
        yield by(of.STORE_PAGES, pages | {"spilled": store.used_spill_page_count})
        yield by(of.STORE_TENSORS, {"here": store.tensor_count, "offered": store.offered_count})
        yield by(of.STORE_WAITS, {"tensor": store.waiting_count, "pages": store.queued_count})

    def _peers_and_callers(self, state: NodeState) -> Iterator[Reading]:
        peers = Counter(peer.state for peer in state.peers.lives.values())
        yield by(of.PEERS, {known.value: peers[known] for known in PeerState})
        paths = Counter(path.data_path for peer in state.peers.lives.values() for path in peer.paths.values())
        yield by(of.PEER_PATHS, {name: count for name, count in paths.items() if name})
        denied = self._lead.gate.denied
        yield by(of.DENIED, {reason.value: denied[reason] for reason in DENIALS | denied.keys()})
        yield from queued(self._lead.call_queue)
        yield of.CALL_SECONDS, ((("grpc", *labels), seconds) for labels, seconds in self._lead.calls.seconds.items())

    def _fleet(self) -> Iterator[Reading]:
        entry = self._lead.publication
        if entry is not None and entry.used:
            yield one(of.FLEET_PUBLISHED, entry.published)

    def _process(self, state: NodeState) -> Iterator[Reading]:
        lead, ledger = self._lead, state.ledger
        limits = ledger.limits
        most = {
            LedgerShare.CALLERS: limits.kept_bytes,
            LedgerShare.PEERS: limits.kept_bytes,
            LedgerShare.ENGINE: limits.engine_kept_bytes,
        }
        yield by(of.KEPT_BYTES, {share.value: ledger.by_share[share] for share in LedgerShare})
        yield by(of.KEPT_BYTES_MAX, {share.value: most[share] for share in LedgerShare})
        yield by(of.KEPT_BY_KIND, {kind.value: nbytes for kind, nbytes in ledger.by_kind.items()})
        present, _ = admission(lead)
        names = {name.removeprefix("ADMISSION_").lower(): number for name, number in handshake_pb2.Admission.items()}
        yield by(of.ADMISSION, {name: number == present for name, number in names.items() if number})
        yield one(of.UPTIME, state.now - state.life.began)
        yield one(of.DEFECTS, lead.runner.defects)
        yield one(of.LOOP_LAG, self.lag.seconds)
        if self._tls is not None:
            yield one(of.CERTIFICATE_END, self._tls.identity.not_after.timestamp())
            yield one(of.TLS_BROKEN, bool(self._tls.error))
        yield of.BUILD_INFO, [((lead.version, grpc.__version__, str(PROTOCOL_MAX)), 1)]


def _blocks(state: NodeState) -> Iterator[Reading]:
    """Yields the readings of blocks, whose states add up to all blocks of a space."""
    pins = state.pool.pins
    rows: dict[Labels, float] = {}
    soft: dict[str, float] = {}
    for space, group in {space: group for group, space in enumerate(pins.spaces)}.items():
        mask, quarantined = pins.pinned_mask(group), pins.quarantined[space]
        pinned = int(mask.sum())
        counts = {"free": pins.free[space], "pinned": pinned - quarantined, "quarantined": quarantined}
        counts["allocated"] = len(mask) - pins.free[space] - pinned
        rows |= {(str(space), name): count for name, count in counts.items()}
        soft[str(space)] = pins.soft[space]
    since = [pin.since for pin in pins if pin.kind is PinKind.QUARANTINE] if any(pins.quarantined) else []
    yield of.BLOCKS, rows.items()
    yield by(of.SOFT_BLOCKS, soft)
    yield one(of.QUARANTINE_AGE, state.now - min(since, default=state.now))
