"""A source that is no kvgrpc server: a real gRPC server with real shared memory, whose answers a test chooses."""

import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

import grpc

from kvgrpc.core.values import grants
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.datapath.host.memory import SharedMemory
from kvgrpc.datapath.paths.shm import ShmPath
from kvgrpc.peer.v1 import peer_pb2, peer_pb2_grpc
from kvgrpc.v1 import calls_pb2, common_pb2, handshake_pb2, handshake_pb2_grpc, lease_pb2, lease_pb2_grpc
from kvgrpc.wire.accesses import CALLS
from kvgrpc.wire.endpoints import endpoint_to_proto
from tests.service.engines import BLOCK_TOKENS, Engine
from tests.service.values import dur, group

Change = Callable[[Any], object]
BLOCKS = [3, 4, 5]


_M = TypeVar("_M")


class Rogue(
    handshake_pb2_grpc.HandshakeServiceServicer, peer_pb2_grpc.PeerServiceServicer, lease_pb2_grpc.LeaseServiceServicer
):
    """A good source, except for a test's changes to its replies, by the name of the RPC, or of the call between leads.

    A change gets the reply. It may alter it, return another one or bytes that are no message, raise `Abort`, or wait.
    """

    def __init__(self, like: Engine) -> None:
        described = like.api.handshake.GetCapabilities(handshake_pb2.GetCapabilitiesRequest())
        self.engine = described.engine
        self.engine.engine_id = f"rogue-{secrets.token_hex(4)}"
        self.engine.incarnation = secrets.randbits(52) + 1
        self.told = b""
        """Proof that the rogue shows on its liveness streams."""
        self.changes: dict[str, Change] = {}
        self.calls: dict[str, int] = {}
        self.traceparents: dict[str, str] = {}
        """Trace context of the last call of each name."""
        self._memory = SharedMemory.create(described.engine.pool.total_bytes)
        self._path = ShmPath(self._memory)
        self._server = grpc.server(ThreadPoolExecutor(16))
        loose: Any = _Loose(self._server)
        handshake_pb2_grpc.add_HandshakeServiceServicer_to_server(self, loose)
        peer_pb2_grpc.add_PeerServiceServicer_to_server(self, loose)
        lease_pb2_grpc.add_LeaseServiceServicer_to_server(self, loose)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.engine.address = f"127.0.0.1:{port}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait(10)
        self._path.close()
        self._memory.close()

    def grant(self, tokens: int, ttl_s: float = 30.0) -> common_pb2.Grant:
        """Returns a grant of blocks that this source may or may not have."""
        me, key = self.engine, secrets.token_bytes(16)
        own = me.engine_id, me.incarnation, me.address
        claims = grants.Claims(grants.AccessKind.READ, *own, "l-rogue", key, ttl_s, len(BLOCKS), tokens)
        return common_pb2.Grant(token=grants.mint(claims, b"rogue"))

    def Handshake(self, request: handshake_pb2.HandshakeRequest, context: Any) -> handshake_pb2.HandshakeResponse:  # noqa: N802
        endpoint = endpoint_to_proto(self._path.offer(RankEndpoint(0)))
        self.told = request.proof
        reply = handshake_pb2.HandshakeResponse(
            engine=self.engine, endpoints=[endpoint], protocol=1, proof=secrets.token_bytes(32)
        )
        return self._unary("Handshake", reply, context)

    def KeepLiveness(  # noqa: N802
        self, request_iterator: Iterator[peer_pb2.KeepLivenessRequest], context: Any
    ) -> Iterator[peer_pb2.KeepLivenessResponse]:
        for _ in request_iterator:
            yield self._unary("KeepLiveness", peer_pb2.KeepLivenessResponse(proof=self.told), context)

    def RenewLeases(self, request: lease_pb2.RenewLeasesRequest, context: Any) -> lease_pb2.RenewLeasesResponse:  # noqa: N802
        reply = lease_pb2.RenewLeasesResponse(leases=[lease_pb2.RenewedLease(remaining=dur(30))] * len(request.leases))
        return self._unary("RenewLeases", reply, context)

    def Converse(  # noqa: N802
        self, request_iterator: Iterator[peer_pb2.ConverseRequest], context: Any
    ) -> Iterator[Any]:
        for message in request_iterator:
            for call in message.calls:
                yield _field(1, self.answer(call))

    def answer(self, call: peer_pb2.PeerCall) -> bytes:
        """Returns the encoded answer to a call on a stream."""
        field = str(call.WhichOneof("call"))
        try:
            good = getattr(self, field)(getattr(call, field))
            body = _serialized(self._changed(CALLS[field], good, call.traceparent))
        except Abort as wanted:
            body, field = wanted.packed, "error"
        number = peer_pb2.PeerAnswer.DESCRIPTOR.fields_by_name[field].number
        return peer_pb2.PeerAnswer(call_id=call.call_id).SerializeToString() + _field(number, body)

    def open_access(self, request: peer_pb2.OpenAccessRequest) -> peer_pb2.OpenAccessResponse:
        reply = peer_pb2.OpenAccessResponse()
        for row in request.openings:
            count = -(-row.content.token_count // BLOCK_TOKENS)
            reply.results.add(
                blocks=[group(BLOCKS[:count])], token_count=row.content.token_count, offer_tokens=40,
                remaining=dur(30), ttl=dur(30), transfer_id="t-rogue", lease_id="l-rogue",
            )  # fmt: skip
        return reply

    def settle_access(self, request: peer_pb2.SettleAccessRequest) -> peer_pb2.SettleAccessResponse:
        rows = [peer_pb2.SettledAccess(verdict=peer_pb2.VERDICT_VALID) for _ in request.settlings]
        return peer_pb2.SettleAccessResponse(results=rows)

    def close_access(self, request: peer_pb2.CloseAccessRequest) -> peer_pb2.CloseAccessResponse:
        return peer_pb2.CloseAccessResponse(results=[peer_pb2.ClosedAccess(was_open=True) for _ in request.closings])

    def _unary(self, rpc: str, reply: _M, context: Any) -> _M:
        try:
            return self._changed(rpc, reply, dict(context.invocation_metadata()).get("traceparent", ""))
        except Abort as wanted:
            context.set_trailing_metadata(wanted.trailers)
            context.abort(wanted.code, wanted.details)
            raise

    def _changed(self, rpc: str, reply: _M, traceparent: str) -> _M:
        self.calls[rpc] = self.calls.get(rpc, 0) + 1
        self.traceparents[rpc] = traceparent
        change = self.changes.get(rpc)
        other: Any = None if change is None else change(reply)
        return other if other is not None else reply


class _Loose:
    """A registry of services that may answer bytes."""

    def __init__(self, server: grpc.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Does nothing, because generated code also registers every service in the other way."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        loose = {name: handler._replace(response_serializer=_serialized) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, loose),))


def _field(number: int, body: bytes) -> bytes:
    """Returns a length-delimited field of a message, whatever its body is."""
    size, length = len(body), b""
    while size > 0x7F:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + body


def _serialized(reply: Any) -> bytes:
    return reply if isinstance(reply, bytes) else reply.SerializeToString()


class Abort(Exception):
    """An exception that ends a call with that status."""

    def __init__(self, code: grpc.StatusCode, details: str = "", trailers: tuple[tuple[str, bytes], ...] = ()) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
        self.trailers = trailers

    @property
    def packed(self) -> bytes:
        """The status as the error of a call on a stream; details may be no message."""
        status: bytes = calls_pb2.CallStatus(code=self.code.value[0], message=self.details).SerializeToString()
        return status + b"".join(value for _, value in self.trailers)


def abort(code: grpc.StatusCode, *trailers: tuple[str, bytes]) -> Change:
    """Returns a change that ends the call."""

    def change(_: Any) -> NoReturn:
        raise Abort(code, "no", trailers)

    return change


def garbage(_: Any) -> bytes:
    """Answers bytes that are no message."""
    return b"\xff\xff\xff"


def too_late(_: Any) -> None:
    """Answers after the caller has given up."""
    time.sleep(3.0)
