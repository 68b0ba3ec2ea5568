"""The whole API of one server as plain generated stubs, and refusals as a client sees them.

Every unary call has a deadline, and so has every call between leads, which goes over a stream of its own. A refusal is
read by the rules that the schema states for all clients: code, ErrorInfo, BadRequest, RetryInfo. `refused` also checks
each refusal against the "Errors:" list of its RPC or call in proto/.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_channelz.v1 import channelz_pb2_grpc
from grpc_health.v1 import health_pb2_grpc

from kvgrpc.peer.v1 import peer_pb2, peer_pb2_grpc
from kvgrpc.v1 import (
    admin_pb2_grpc,
    calls_pb2,
    calls_pb2_grpc,
    common_pb2,
    fleet_pb2_grpc,
    handoff_pb2_grpc,
    handshake_pb2,
    handshake_pb2_grpc,
    lease_pb2_grpc,
    pool_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    tensor_pb2_grpc,
    transfer_pb2_grpc,
)
from kvgrpc.wire.accesses import CALLS
from kvgrpc.wire.paths import ABOUT_ENGINES, is_field
from tests.service.contract import errors_of

CALL_S = 60.0
"""Default deadline of a call, in seconds: far above what any call may take, below the limit of a test."""
_KINDS = {name: kind for kind, name in CALLS.items()}


@dataclass(frozen=True)
class Refusal:
    """A call that was refused."""

    method: str
    code: str
    reason: str
    """ErrorInfo.reason, or "" if the status has no details of a kvgrpc server."""
    message: str
    fields: tuple[str, ...] = ()
    """Fields of BadRequest."""
    retry_delay_s: float | None = None
    metadata: dict[str, str] = field(default_factory=dict)


class Api:
    """Stubs of every service of the server at `address`. With a `ticket`, unary calls speak for the attached engine."""

    def __init__(self, address: str, ticket: bytes = b"") -> None:
        self._deadlines = _Deadlines((("kvgrpc-ticket", ticket.hex()),) if ticket else ())
        self.plain = grpc.insecure_channel(
            address, options=[("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        )
        channel = grpc.intercept_channel(self.plain, self._deadlines)
        self.channel = channel
        self.handshake = handshake_pb2_grpc.HandshakeServiceStub(channel)
        self.handoff = handoff_pb2_grpc.HandoffServiceStub(channel)
        self.transfers = transfer_pb2_grpc.TransferServiceStub(channel)
        self.leases = lease_pb2_grpc.LeaseServiceStub(channel)
        self.scheduler = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        self.tensors = tensor_pb2_grpc.TensorServiceStub(channel)
        self.pool = pool_pb2_grpc.PoolServiceStub(channel)
        self.calls = calls_pb2_grpc.CallServiceStub(channel)
        self.fleet = fleet_pb2_grpc.FleetServiceStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(channel)
        self.peer = peer_pb2_grpc.PeerServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)
        self.channelz = channelz_pb2_grpc.ChannelzStub(channel)

    @property
    def last_method(self) -> str:
        """The RPC or call between leads that was made last, as /package.Service/Method; Schedule after a step."""
        return self._deadlines.last_method

    def ask(self, caller: peer_pb2.Caller, request: Message, **fields: Any) -> Any:
        """Makes one call between leads, with these fields of PeerCall, and returns the reply. Raises CallFailed."""
        name = request.DESCRIPTOR.name.removesuffix("Request")
        self._deadlines.last_method = f"/kvgrpc.peer.v1.PeerService/{name}"
        message = peer_pb2.ConverseRequest(caller=caller, calls=[peer_pb2.PeerCall(call_id=1, **fields)])
        getattr(message.calls[0], _KINDS[name]).CopyFrom(request)
        stream = self.peer.Converse(iter([message]), timeout=CALL_S)
        ((answer,),) = [message.answers for message in stream]
        if answer.HasField("error"):
            raise CallFailed(answer.error)
        return getattr(answer, _KINDS[name])

    def step(self, request: scheduler_pb2.ScheduleRequest) -> scheduler_pb2.ScheduleResponse:
        """Makes one step of a scheduler, over a stream of its own."""
        self._deadlines.last_method = "/kvgrpc.v1.SchedulerService/Schedule"
        (reply,) = self.scheduler.Schedule(iter([request]), timeout=CALL_S, metadata=self._deadlines.metadata)
        return reply

    def refusal(self, call: Callable[[], object]) -> Refusal:
        """Makes the call and returns its refusal. Fails if the call succeeds."""
        try:
            answer = call()
        except grpc.RpcError as error:
            return read_refusal(self.last_method, error)
        raise AssertionError(f"not refused: {str(answer)[:500]}")

    def close(self) -> None:
        self.plain.close()


class CallFailed(grpc.RpcError):
    """The error of a call on a stream, in the form of a unary call's error."""

    def __init__(self, error: calls_pb2.CallStatus) -> None:
        super().__init__(error.message)
        self._error = error

    def code(self) -> grpc.StatusCode:
        return next(code for code in grpc.StatusCode if code.value[0] == self._error.code)

    def details(self) -> str:
        return self._error.message

    def trailing_metadata(self) -> Any:
        return (("grpc-status-details-bin", self._error.SerializeToString()),)


def read_refusal(method: str, error: grpc.RpcError) -> Refusal:
    """Returns what a client learns from a failed call."""
    code, message = error.code().name, error.details() or ""
    metadata: Any = error.trailing_metadata() or ()
    trailers: dict[str, Any] = dict(metadata)
    packed = trailers.get("grpc-status-details-bin")
    if not isinstance(packed, bytes):
        return Refusal(method, code, "", message)
    status = status_pb2.Status.FromString(packed)
    assert status.code == error.code().value[0]
    info, fields, delay_s = error_details_pb2.ErrorInfo(), (), None
    for detail in status.details:
        bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad):
            fields = tuple(violation.field for violation in bad.field_violations)
        elif detail.Unpack(retry):
            delay_s = retry.retry_delay.ToNanoseconds() / 1e9
        else:
            assert detail.Unpack(info), detail.type_url
    assert info.domain == "kvgrpc.dev"
    check_paths(method, info.reason, fields)
    assert f"NEXT_STEP_{info.metadata['next']}" in common_pb2.NextStep.keys()  # noqa: SIM118 - no mapping
    assert info.metadata["engine_id"]
    assert int(info.metadata["incarnation"]) < 2**53
    assert (delay_s is None) or info.metadata["next"] == "RETRY_HERE", info
    return Refusal(method, code, info.reason, message, fields, delay_s, dict(info.metadata))


ASKED_BY_ANOTHER = ("expected.",)
"""Prefixes of field paths from another caller's request: PutTensor reports what a consumer's GetTensor expects."""


def check_paths(method: str, reason: str, fields: tuple[str, ...]) -> None:
    """Checks that each path of a refusal is a field of the request, by the schema's names."""
    service, _, name = method.strip("/").partition("/")
    if not service.startswith("kvgrpc."):
        return
    request = descriptor_pool.Default().FindMessageTypeByName(f"{service.rpartition('.')[0]}.{name}Request")
    engine = handshake_pb2.EngineDescription.DESCRIPTOR
    for path in fields:
        about_engines = reason in ABOUT_ENGINES and is_field(path, engine)
        told = path.startswith(ASKED_BY_ANOTHER) and service.endswith("TensorService")
        of_call = service.endswith("PeerService") and is_field(path, peer_pb2.PeerCall.DESCRIPTOR)
        assert is_field(path, request) or about_engines or told or of_call, f"{method} has no field {path} ({reason})"


@contextmanager
def refused(api: Api, code: str, reason: str) -> Iterator[None]:
    """Checks that the call in the body is refused with that code and reason, which the schema must list."""
    try:
        yield
    except grpc.RpcError as error:
        found = read_refusal(api.last_method, error)
    else:
        raise AssertionError(f"{api.last_method} was not refused with {code} {reason}")
    assert (found.code, found.reason) == (code, reason), found
    assert found.message
    assert (code, reason) in errors_of(found.method), f"proto does not list {code} {reason} for {found.method}"


@dataclass(frozen=True)
class _Details:
    """A grpc.ClientCallDetails with another timeout."""

    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class _Deadlines(grpc.UnaryUnaryClientInterceptor):
    def __init__(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self.last_method = ""
        self.metadata = metadata

    def intercept_unary_unary(
        self, continuation: Callable[[Any, Any], Any], client_call_details: Any, request: Any
    ) -> Any:
        old = client_call_details
        self.last_method = old.method if isinstance(old.method, str) else old.method.decode()
        timeout = CALL_S if old.timeout is None else old.timeout
        metadata = (*(old.metadata or ()), *self.metadata)
        details = _Details(
            old.method, timeout, metadata, old.credentials, old.wait_for_ready, getattr(old, "compression", None)
        )
        return continuation(details, request)


def without(message: Message, *names: str) -> str:
    """Returns the text of a message without these fields, at any depth, because they change by themselves."""
    copy = type(message)()
    copy.CopyFrom(message)
    _clear(copy, names)
    return str(copy)


def _clear(message: Message, names: tuple[str, ...]) -> None:
    for descriptor, value in message.ListFields():
        if descriptor.name in names:
            message.ClearField(descriptor.name)
        elif descriptor.message_type and not descriptor.message_type.GetOptions().map_entry:
            for item in value if descriptor.is_repeated else [value]:
                _clear(item, names)
