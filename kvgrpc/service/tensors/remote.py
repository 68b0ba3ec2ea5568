"""TensorService of other leads."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from kvgrpc.core.tensors.calls import LeadAddress
from kvgrpc.errors import KVGrpcError, PreconditionFailed, Reason
from kvgrpc.service import telemetry
from kvgrpc.service.peers.stream import bounded, failure_of
from kvgrpc.v1 import tensor_pb2, tensor_pb2_grpc

CHANNELS_MAX = 256
"""Maximum number of channels kept open while no call uses them."""
GRACE_S = 2.0
"""Time the other lead gets to report a timeout, beyond the timeout itself, in seconds."""


class RemoteStores:
    """Calls to the leads of other engines, with a channel for each address."""

    def __init__(self, connect: Callable[[str], grpc.aio.Channel]) -> None:
        """`connect` opens a channel to an address."""
        self._connect = connect
        self._channels: dict[str, tuple[grpc.aio.Channel, tensor_pb2_grpc.TensorServiceAsyncStub]] = {}
        self._calls: dict[str, int] = {}
        """Number of calls in flight, by address."""

    def put(
        self, at: LeadAddress, request: tensor_pb2.PutTensorRequest, timeout_s: float, trace: str
    ) -> Awaitable[tensor_pb2.PutTensorResponse]:
        """Calls PutTensor at a consumer. Raises its refusal, or Unavailable (PEER_UNREACHABLE)."""
        return self._call(at, "PutTensor", request, timeout_s, trace)

    def get(
        self, at: LeadAddress, request: tensor_pb2.GetTensorRequest, timeout_s: float, trace: str
    ) -> Awaitable[tensor_pb2.GetTensorResponse]:
        """Calls GetTensor at a source. Raises the same errors as `put`."""
        return self._call(at, "GetTensor", request, timeout_s, trace)

    def release(
        self, at: LeadAddress, request: tensor_pb2.ReleaseTensorsRequest, timeout_s: float, trace: str
    ) -> Awaitable[tensor_pb2.ReleaseTensorsResponse]:
        """Calls ReleaseTensors at a source. Raises the same errors as `put`."""
        return self._call(at, "ReleaseTensors", request, timeout_s, trace)

    def renew(self) -> None:
        """Opens new channels for later calls. A channel closes with the last call that is under way on it."""
        self._channels.clear()

    async def stop(self) -> None:
        """Ends all channels and the calls in flight."""
        channels, self._channels = self._channels, {}
        for channel, _ in channels.values():
            await channel.close()

    async def _call(self, at: LeadAddress, method: str, request: Any, timeout_s: float, trace: str) -> Any:
        address = at.address
        traceparent, ended = telemetry.call_span(f"kvgrpc.v1.TensorService/{method}", trace, address)
        self._calls[address] = self._calls.get(address, 0) + 1
        error: KVGrpcError | None = None
        try:
            call: Callable[..., Awaitable[Any]] = getattr(self._stub(address), method)
            reply = await call(request, timeout=timeout_s + GRACE_S, metadata=telemetry.metadata(traceparent))
            return _checked(bounded(reply, address), at)
        except Exception as failed:  # noqa: BLE001 - the caller hears a typed error in any case
            error = failure_of(failed, method)
        finally:
            self._done(address)
            ended(error)
        raise error

    def _stub(self, address: str) -> "tensor_pb2_grpc.TensorServiceAsyncStub":
        known = self._channels.get(address)
        if known is None:
            channel = self._connect(address)
            known = self._channels[address] = channel, tensor_pb2_grpc.TensorServiceStub(channel)
        return known[1]

    def _done(self, address: str) -> None:
        self._calls[address] -= 1
        if not self._calls[address]:
            del self._calls[address]
            if len(self._channels) > CHANNELS_MAX:
                self._channels.pop(address, None)  # it closes with its last reference


def _checked(reply: Any, at: LeadAddress) -> Any:
    """Returns a reply. Raises PreconditionFailed (WRONG_ENGINE) for a reply of another engine."""
    if at.engine_id and reply.header.engine_id != at.engine_id:
        raise PreconditionFailed(
            Reason.WRONG_ENGINE, f"engine {reply.header.engine_id} answers at {at.address}, not {at.engine_id}"
        )
    return reply
