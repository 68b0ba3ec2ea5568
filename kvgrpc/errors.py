"""Errors of kvgrpc, for every layer: the core raises them, the service maps them, the client gets them back.

    KVGrpcError
    ├── InvalidRequest        the request itself is wrong: fix it
    ├── OutOfRange            a block id, token count or layer outside what exists: fix it, never clamped
    ├── NotFound              no such lease, transfer, peer, access
    ├── AlreadyExists         an id or idempotency key was used before, for something else
    ├── PreconditionFailed    right request, wrong moment or wrong pair: `next` says what would help
    ├── Unauthenticated       nobody knows who calls: show a certificate or a valid token
    ├── PermissionDenied      the grant or the caller does not allow it
    ├── Aborted               the engine behind a reference has restarted: start over from the hand-over
    ├── Exhausted             a bounded resource is full: `retry_delay_s` says when to come back
    ├── Unavailable           the peer or server cannot be reached: safe to retry
    ├── DeadlineExceeded      a bounded wait ended: `phase` names the wait
    ├── DataLoss              bytes arrived that are not the ones sent
    ├── Unimplemented         declared in the schema, not offered by this server
    └── InternalError         a data path or kvgrpc itself failed

The class is the kind of answer, one gRPC code each. `reason` is the exact cause. The strings of `Reason` are API: they
travel in ErrorInfo.reason, and are the names of `kvgrpc.v1.FailureReason` without its prefix.

Standard library only: this is the lowest layer.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Self

NOTE_BYTES_MAX = 1_024
"""Maximum size of a text for people, in bytes; a longer one is cut."""
VIOLATIONS_MAX = 16
"""Maximum number of violations in one error; the first ones are kept."""
_CUT = "…"


def note(value: str, most: int = NOTE_BYTES_MAX) -> str:
    """Returns a text for people, from any origin: a long one cut, with unprintable characters escaped as Python does. A
    bad text thus never stops the call that carries it, and harms no reply, log line or terminal.
    """
    if len(value) * 4 <= most and value.isprintable():
        return value
    shown = value[: most + 1]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)
    whole = shown.encode()
    if len(whole) <= most:
        return shown
    return whole[: most - len(_CUT.encode())].decode(errors="ignore") + _CUT


class Reason(StrEnum):
    """Exact cause of an error. Each value is one of `kvgrpc.v1.FailureReason`; a test compares them."""

    INVALID_FIELD = "INVALID_FIELD"
    BLOCK_OUT_OF_RANGE = "BLOCK_OUT_OF_RANGE"
    BLOCK_DUPLICATE = "BLOCK_DUPLICATE"
    BLOCK_PINNED = "BLOCK_PINNED"
    BLOCK_NOT_ALLOCATED = "BLOCK_NOT_ALLOCATED"
    BLOCK_COUNT_MISMATCH = "BLOCK_COUNT_MISMATCH"
    GROUP_MISMATCH = "GROUP_MISMATCH"
    INCOMPATIBLE_POOLS = "INCOMPATIBLE_POOLS"
    PROTOCOL_UNSUPPORTED = "PROTOCOL_UNSUPPORTED"
    NO_DATA_PATH = "NO_DATA_PATH"
    NO_HANDSHAKE = "NO_HANDSHAKE"
    WRONG_ENGINE = "WRONG_ENGINE"
    DIAL_REFUSED = "DIAL_REFUSED"
    PEER_UNREACHABLE = "PEER_UNREACHABLE"
    PEER_LOST = "PEER_LOST"
    PEER_FAILED = "PEER_FAILED"
    GRANT_INVALID = "GRANT_INVALID"
    GRANT_FOREIGN = "GRANT_FOREIGN"
    GRANT_WRONG_ACCESS = "GRANT_WRONG_ACCESS"
    INCARNATION_CHANGED = "INCARNATION_CHANGED"
    MEMORY_CHANGED = "MEMORY_CHANGED"
    LEASE_NOT_FOUND = "LEASE_NOT_FOUND"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    LEASE_RELEASED = "LEASE_RELEASED"
    LEASE_VOIDED = "LEASE_VOIDED"
    LEASE_REFUSED = "LEASE_REFUSED"
    ACCESS_NOT_FOUND = "ACCESS_NOT_FOUND"
    ACCESS_REUSED = "ACCESS_REUSED"
    ACCESS_CLOSED = "ACCESS_CLOSED"
    CONTENT_MISMATCH = "CONTENT_MISMATCH"
    CONTENT_REQUIRED = "CONTENT_REQUIRED"
    CONTENT_RANGE = "CONTENT_RANGE"
    WEIGHTS_MISMATCH = "WEIGHTS_MISMATCH"
    TRANSFER_KEY_MISMATCH = "TRANSFER_KEY_MISMATCH"
    TRANSFER_NOT_FOUND = "TRANSFER_NOT_FOUND"
    TRANSFER_ENDED = "TRANSFER_ENDED"
    TRANSFER_EXISTS = "TRANSFER_EXISTS"
    WAITS_FOR_MISMATCH = "WAITS_FOR_MISMATCH"
    EMPTY_FINISH = "EMPTY_FINISH"
    CANCELLED = "CANCELLED"
    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
    TRANSFER_TIMEOUT = "TRANSFER_TIMEOUT"
    SETTLE_TIMEOUT = "SETTLE_TIMEOUT"
    REGISTRATION_TIMEOUT = "REGISTRATION_TIMEOUT"
    DEADLINE = "DEADLINE"
    IDEMPOTENCY_KEY_REUSED = "IDEMPOTENCY_KEY_REUSED"
    TTL_INVALID = "TTL_INVALID"
    POOL_EXHAUSTED = "POOL_EXHAUSTED"
    QUEUE_FULL = "QUEUE_FULL"
    LIMIT_EXCEEDED = "LIMIT_EXCEEDED"
    DRAINING = "DRAINING"
    QUARANTINED = "QUARANTINED"
    ENGINE_LOST = "ENGINE_LOST"
    ENGINE_ATTACHED = "ENGINE_ATTACHED"
    NO_POOL = "NO_POOL"
    POOL_KIND_MISMATCH = "POOL_KIND_MISMATCH"
    READ_BLOCKS_DISABLED = "READ_BLOCKS_DISABLED"
    NOT_OWNER = "NOT_OWNER"
    DATA_PATH_FAILED = "DATA_PATH_FAILED"
    CHECKSUM_MISMATCH = "CHECKSUM_MISMATCH"
    SOURCE_FAILED = "SOURCE_FAILED"
    PREEMPTED = "PREEMPTED"
    FEATURE_UNAVAILABLE = "FEATURE_UNAVAILABLE"
    HISTORY_LOST = "HISTORY_LOST"
    INTERNAL = "INTERNAL"
    INTERNAL_DEFECT = "INTERNAL_DEFECT"
    LEASE_RECLAIMED = "LEASE_RECLAIMED"
    NOT_PROVED = "NOT_PROVED"
    NOT_AUTHENTICATED = "NOT_AUTHENTICATED"
    ROLE_MISSING = "ROLE_MISSING"
    POLICY_DENIED = "POLICY_DENIED"
    GRANT_BOUND = "GRANT_BOUND"
    NETWORK_NOT_PRIVATE = "NETWORK_NOT_PRIVATE"


class NextStep(StrEnum):
    """Step that helps after a refusal. Each value is one of `kvgrpc.v1.NextStep`; a test compares them."""

    RETRY_HERE = "RETRY_HERE"
    """Repeat the call at the same engine, after the delay if one is stated."""
    RETRY_OTHER_CONSUMER = "RETRY_OTHER_CONSUMER"
    """Repeat the call with another engine in place of this one: the same grant on another consumer."""
    RECOMPUTE = "RECOMPUTE"
    """Start over and compute the KV: what the request names is lost."""
    FIX_REQUEST = "FIX_REQUEST"
    """Correct the request: it fails everywhere."""


@dataclass(frozen=True)
class FieldViolation:
    """One wrong field of a request or one incompatible field of a pair."""

    field: str
    """Dotted path from the request's root, for example `destination.groups[0].blocks`."""
    description: str
    """Text that says what is wrong with the field and what would be right."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "field", note(self.field))
        object.__setattr__(self, "description", note(self.description))


class KVGrpcError(Exception):
    """Base of all errors. `str(error)` is the sentence for people; `reason` is for programs.

    Its texts are notes, because many contain what others sent.
    """

    code: ClassVar[str] = "UNKNOWN"
    """Name of the gRPC status code of this class. It is the one table of codes: both directions are derived from it."""

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        violations: tuple[FieldViolation, ...] = (),
        retry_delay_s: float | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        self.reason = reason
        self.message = note(message)
        self.violations = violations[:VIOLATIONS_MAX]
        self.retry_delay_s = retry_delay_s
        self.metadata = metadata or {}
        self.next: NextStep | None = None
        """The next step that the refusing server stated; None if none did: then no machine retries. When this server
        refuses, the value overrides the step of reason and class.
        """
        self.engine_id = ""
        """The engine that refused; empty if no engine did."""
        self.incarnation = 0
        """The incarnation of the engine that refused."""
        super().__init__(self.message)

    def untraced(self) -> Self:
        """Returns this error without traceback and causes, so that it can be kept: frames hold request data."""
        self.__traceback__ = self.__context__ = self.__cause__ = None
        return self

    @property
    def sentence(self) -> str:
        """The message with the wrong fields, without the reason: a note."""
        return note(_said(self.message, self.violations))

    def __str__(self) -> str:
        return f"{self.reason}: {_said(self.message, self.violations)}"


def _said(message: str, violations: tuple[FieldViolation, ...]) -> str:
    """Returns a message with its violations. A message that is one of them is written once, behind its field."""
    same = next((v for v in violations if v.description == message), None)
    if same is None:
        return message + _listed(violations)
    return f"{same.field}: {message}{_listed(tuple(v for v in violations if v is not same))}"


def _listed(violations: tuple[FieldViolation, ...]) -> str:
    return "".join(f"; {v.field}: {v.description}" for v in violations)


def said_once(message: str, reason: Reason, violations: tuple[FieldViolation, ...]) -> str:
    """Returns a message without the reason and violations that a server wrote into it: the error adds them."""
    message = message.removeprefix(f"{reason}: ")
    for violation in violations:
        if message.startswith(f"{violation.field}: {violation.description}"):
            return violation.description
    if violations:
        suffix = _listed(violations)
        at = message.find(suffix[: len(violations[0].field) + 4])
        if at >= 0 and suffix.startswith(message[at:]):  # long ones are cut
            return message[:at]
    return message


class InvalidRequest(KVGrpcError):
    """The request is malformed (gRPC INVALID_ARGUMENT)."""

    code = "INVALID_ARGUMENT"


class OutOfRange(KVGrpcError):
    """A number lies outside what exists (gRPC OUT_OF_RANGE)."""

    code = "OUT_OF_RANGE"


class NotFound(KVGrpcError):
    """The named resource does not exist here (gRPC NOT_FOUND)."""

    code = "NOT_FOUND"


class AlreadyExists(KVGrpcError):
    """The id or key is taken by something else (gRPC ALREADY_EXISTS)."""

    code = "ALREADY_EXISTS"


class PreconditionFailed(KVGrpcError):
    """The request is well formed but the state or the pair forbids it (gRPC FAILED_PRECONDITION)."""

    code = "FAILED_PRECONDITION"


class Unauthenticated(KVGrpcError):
    """The caller shows no identity that is valid here (gRPC UNAUTHENTICATED)."""

    code = "UNAUTHENTICATED"


class PermissionDenied(KVGrpcError):
    """The grant or the caller's role forbids the request (gRPC PERMISSION_DENIED)."""

    code = "PERMISSION_DENIED"


class Aborted(KVGrpcError):
    """A reference outlived the engine life it belongs to (gRPC ABORTED): start over from the hand-over."""

    code = "ABORTED"


class Exhausted(KVGrpcError):
    """A bounded resource is full (gRPC RESOURCE_EXHAUSTED)."""

    code = "RESOURCE_EXHAUSTED"


class Unavailable(KVGrpcError):
    """Server or peer cannot serve now (gRPC UNAVAILABLE); the only kind that clients retry by themselves."""

    code = "UNAVAILABLE"


class DeadlineExceeded(KVGrpcError):
    """A bounded wait ended (gRPC DEADLINE_EXCEEDED); `metadata["phase"]` names it."""

    code = "DEADLINE_EXCEEDED"


class DataLoss(KVGrpcError):
    """The bytes that arrived are not the ones that were sent (gRPC DATA_LOSS)."""

    code = "DATA_LOSS"


class Unimplemented(KVGrpcError):
    """The schema declares what this server does not offer (gRPC UNIMPLEMENTED)."""

    code = "UNIMPLEMENTED"


class InternalError(KVGrpcError):
    """A data path or kvgrpc itself failed (gRPC INTERNAL)."""

    code = "INTERNAL"


BY_CODE: dict[str, type[KVGrpcError]] = {kind.code: kind for kind in KVGrpcError.__subclasses__()}
"""Error classes by gRPC status code."""
LATE_WRITE = "Internal error from Core"
"""Text of grpc.aio, with INTERNAL, for a write to a stream that its other end had ended. The other end did not send
this text; the status that it did send is lost.
"""


def full(message: str, limit: int, retry_delay_s: float = 1.0, reason: Reason = Reason.LIMIT_EXCEEDED) -> Exhausted:
    """Returns the error for a table without a place left, or a caller that has its share. Either empties by itself."""
    return Exhausted(reason, message, retry_delay_s=retry_delay_s, metadata={"limit": str(limit)})


def too_many(message: str, limit: int, field: str | None = None, counted: str = "") -> OutOfRange:
    """Returns the error for a request that is over a limit. `field`: the field to blame, which has at most `limit` of
    what is `counted`; None if no single field is.
    """
    violations = () if field is None else (FieldViolation(field, f"at most {limit} {counted}"),)
    return OutOfRange(Reason.LIMIT_EXCEEDED, message, violations=violations, metadata={"limit": str(limit)})


def invalid(field: str, description: str) -> InvalidRequest:
    """Returns the error for one wrong field: its path in the request, what is wrong with it and what would be right."""
    return InvalidRequest(
        Reason.INVALID_FIELD, "the request has a wrong field", violations=(FieldViolation(field, description),)
    )
