"""The audit: who ended or changed something that others may miss. One line of the log for each call, and the last
records for AdminService. Calls that the gate denied (`identity.gate`) are counted and logged there, not here.

Rules:
* A record names things by their ids. It has no transfer key and no grant, which are secrets.
* Refused calls push out no record of a done one: each of both kinds has its own bound.
* Of a caller's refused calls so many are recorded in a minute. The others are gaps in the numbers of the records.
"""

import json
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from heapq import merge
from typing import Any

from kvgrpc.core.tables.transfers import pair_id
from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import KVGrpcError, note
from kvgrpc.wire.values import claims_of

_log = logging.getLogger(__name__)

ROWS_MAX = 4_096
"""Maximum number of records that are kept."""
BYTES_MAX = 1 << 20
"""Maximum size of the texts of the records that are kept, in bytes."""
IDS_MAX = 16
"""Maximum number of ids that one record names."""
REFUSED_ROWS_MAX = 1_024
"""Maximum number of records of refused calls that are kept."""
REFUSED_PER_MINUTE = 10
"""Maximum number of refused calls of one caller that are recorded within a minute."""
MINUTE_S = 60.0
"""Time in which the refused calls of a caller are counted together, in seconds."""
CALLERS_MAX = 4_096
"""Maximum number of callers whose refused calls are counted."""
DONE = "done"
"""Outcome of a call that was not refused."""

Target = Mapping[str, Any]


@dataclass(frozen=True)
class AuditRecord:
    """One call. `at` is on the clock of `time.monotonic`."""

    number: int
    at: float
    caller: str
    connection: str
    method: str
    target: str
    outcome: str
    message: str

    @property
    def nbytes(self) -> int:
        texts = (self.caller, self.connection, self.method, self.target, self.outcome, self.message)
        return sum(len(text.encode()) for text in texts)


class AuditRing:
    """The last records of one kind, oldest first: so many, with texts of so many bytes."""

    def __init__(self, rows: int, nbytes: int) -> None:
        self._rows, self._most = rows, nbytes
        self.records: deque[AuditRecord] = deque()
        self._nbytes = 0

    def add(self, record: AuditRecord) -> None:
        """Adds a record, and drops the oldest of too many."""
        self.records.append(record)
        self._nbytes += record.nbytes
        while len(self.records) > self._rows or self._nbytes > self._most:
            self._nbytes -= self.records.popleft().nbytes


class Audit:
    """The records of one process."""

    def __init__(self, rows: int = ROWS_MAX, nbytes: int = BYTES_MAX, refused_rows: int = REFUSED_ROWS_MAX) -> None:
        self._done, self._refused = AuditRing(rows, nbytes), AuditRing(refused_rows, nbytes)
        self._number = 0
        self._minutes: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """End of the minute and number of refused calls in it, by caller; the last minute that began is the last."""

    def __iter__(self) -> Iterator[AuditRecord]:
        return merge(self._done.records, self._refused.records, key=lambda record: record.number)

    def heard(
        self, method: str, request: Any, caller: str, connection: str = "", error: KVGrpcError | None = None
    ) -> None:
        """Records a call that was served, if it is one of AUDITED and was no check alone."""
        target_of = AUDITED.get(method)
        if target_of is None or getattr(request, "validate_only", False):
            return
        self._number += 1
        now = time.monotonic()
        if error is not None and self._too_often(caller, now):
            return
        target = " ".join(f"{name}={value}" for name, value in target_of(request).items() if value not in ("", 0, []))
        said = getattr(request, "message", "") or getattr(request, "reason", "")
        outcome = DONE if error is None else error.reason.value
        who = note(caller), note(connection)
        record = AuditRecord(self._number, now, *who, method, note(target), outcome, note(said))
        (self._done if error is None else self._refused).add(record)
        if _log.isEnabledFor(logging.INFO):
            names = ("caller", "connection", "method", "target", "outcome", "message")
            line = {name: getattr(record, name) for name in names}
            _log.info("audit %s", json.dumps(line))

    def _too_often(self, caller: str, now: float) -> bool:
        """Counts a refused call. Returns whether its caller has had enough records of this minute."""
        until, count = self._minutes.get(caller, (0.0, 0))
        if now >= until:
            until, count = now + MINUTE_S, 0
            self._minutes.pop(caller, None)
        self._minutes[caller] = until, count + 1
        if len(self._minutes) > CALLERS_MAX:
            self._minutes.popitem(last=False)
        return count >= REFUSED_PER_MINUTE


def _cancelled(request: Any) -> Target:
    key = bytes(request.transfer_key)
    return {"transfer_id": request.transfer_id, "pair_id": pair_id(key) if key else ""}


def _released(request: Any) -> Target:
    lease = request.lease
    try:
        return {"lease_id": claims_of(lease.grant).lease_id if lease.HasField("grant") else lease.lease_id}
    except KVGrpcError:
        return {}  # the grant is none, and its bytes may be a secret of another kind


def _reclaimed(request: Any) -> Target:
    counts = [f"{row.group}:{row.block_count}" for row in request.group_block_counts[:IDS_MAX]]
    return {"request_id": request.request_id, "blocks": ",".join(counts)}


def _unquarantined(request: Any) -> Target:
    ids = request.transfer_ids
    more = len(ids) - IDS_MAX
    return {"force": int(request.force), "transfer_ids": ",".join(ids[:IDS_MAX]), "more": max(more, 0)}


AUDITED: Mapping[str, Callable[[Any], Target]] = {
    "CancelTransfer": _cancelled,
    "ReleaseLease": _released,
    "ReclaimBlocks": _reclaimed,
    "StartDrain": lambda _: {},
    "CancelDrain": lambda _: {},
    "ReleaseQuarantine": _unquarantined,
    "ForgetEngine": lambda request: {"engine_id": request.engine_id},
}
"""Fields of a request that a record names, by method."""
