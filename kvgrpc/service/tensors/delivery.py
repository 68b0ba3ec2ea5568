"""Store to store: the calls that the lead of one engine makes at TensorService of another's."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc.aio

from kvgrpc.core.tensors.descriptions import Get, LeadAddress, NamedTensor, Put, Release, TensorId
from kvgrpc.core.tensors.waits import RETRY_DELAY_S
from kvgrpc.errors import DeadlineExceeded, Exhausted, KVGrpcError, PreconditionFailed, Reason, Unavailable
from kvgrpc.service import telemetry
from kvgrpc.service.peers.stream import bounded, failure_of
from kvgrpc.v1 import tensor_pb2, tensor_pb2_grpc
from kvgrpc.wire.tensors import (
    bundled_to_proto,
    described,
    description_to_proto,
    expected_to_proto,
    name_to_proto,
    wanted_to_proto,
)
from kvgrpc.wire.values import claims_of, duration, grant

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
            reply = bounded(reply, address)
            if at.engine_id and reply.header.engine_id != at.engine_id:
                raise PreconditionFailed(
                    Reason.WRONG_ENGINE, f"engine {reply.header.engine_id} answers at {address}, not {at.engine_id}"
                )
        except Exception as failed:  # noqa: BLE001 - the caller hears a typed error in any case
            error = failure_of(failed, method)
        else:
            return reply
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


TOGETHER_S = 5.0
"""Timeout of a source's answer about several tensors, in seconds."""
GIVE_BACK_S = 5.0
"""Timeout of a source's answer that its tensors are released, in seconds."""


async def deliver(
    remote: RemoteStores, put: Put, token: bytes, consumer: LeadAddress, left: Callable[[], float], trace: str
) -> KVGrpcError | None:
    """Puts a tensor at one consumer, again and again while the consumer has no room or cannot be reached; a bundle only
    once. Returns the error if it is not there, else None. Takes at most `left` seconds.
    """
    refused: KVGrpcError | None = None
    while (left_s := left()) > 0:
        request = tensor_pb2.PutTensorRequest(
            tensor=name_to_proto(put.id), description=description_to_proto(put.described), grant=grant(token),
            timeout=duration(left_s), request_id=put.request_id,
            bundled_tensors=[bundled_to_proto(tensor) for tensor in put.bundled],
        )  # fmt: skip
        if put.ttl_s is not None:
            request.ttl.CopyFrom(duration(put.ttl_s))
        try:
            await remote.put(consumer, request, left_s, trace)
        except (Exhausted, Unavailable) as error:
            refused = error
        except KVGrpcError as error:
            return error
        else:
            return None
        if put.bundled:
            break
        delay_s = max(refused.retry_delay_s or 0.0, RETRY_DELAY_S)
        if delay_s >= left():
            break
        await telemetry.waited("retry", trace, asyncio.sleep(delay_s))
    return refused or DeadlineExceeded(
        Reason.DEADLINE, f"{consumer.address} did not store the tensor in time", metadata={"phase": "tensor"}
    )


async def fetch(remote: RemoteStores, get: Get, timeout_s: float, trace: str) -> Put:
    """Returns a tensor that is kept elsewhere, as a put to receive here. Raises the source's refusal,
    PreconditionFailed (PEER_FAILED) for an answer that is none, and DeadlineExceeded (DEADLINE).
    """
    assert get.source is not None, "it is fetched from somewhere"
    if timeout_s <= 0:
        raise DeadlineExceeded(Reason.DEADLINE, "it was too late to fetch the tensor", metadata={"phase": "tensor"})
    name, expected, left = name_to_proto(get.id), expected_to_proto(get.expected), duration(timeout_s)
    request = tensor_pb2.GetTensorRequest(
        tensor=name, expected=expected, as_offer=True, timeout=left, request_id=get.request_id, tenant=get.tenant
    )
    reply = await remote.get(get.source, request, timeout_s, trace)
    try:
        claims_of(reply.grant)
        found = described(reply.tensor.description)
    except KVGrpcError as error:
        raise PreconditionFailed(Reason.PEER_FAILED, f"{get.source.address} answers with no tensor: {error}") from error
    get.expected.check(found)
    return Put(get.id, found, token=reply.grant.token, request_id=get.request_id, tenant=get.tenant)


async def fetch_together(remote: RemoteStores, gets: Sequence[Get], most_pages: int, trace: str) -> Put:
    """Returns several tensors of a request that their source keeps and gives together, as a put to receive here. They
    may be fewer than asked. Raises the same errors as `fetch`.
    """
    first, source = gets[0], gets[0].source
    assert source is not None, "they are fetched from somewhere"
    request = tensor_pb2.GetTensorRequest(
        tensor=name_to_proto(first.id), expected=expected_to_proto(first.expected), as_offer=True,
        timeout=duration(TOGETHER_S), request_id=first.request_id,
        bundled_tensors=[wanted_to_proto(get) for get in gets[1:]], page_count_max=most_pages,
        tenant=first.tenant,
    )  # fmt: skip
    reply = await remote.get(source, request, TOGETHER_S, trace)
    wanted = {get.id: get for get in gets}
    try:
        claims_of(reply.grant)
        found = [
            NamedTensor(TensorId(first.id.key, row.name, row.part), described(row.description))
            for row in (reply.tensor, *reply.bundled_tensors)
        ]
    except KVGrpcError as error:
        raise PreconditionFailed(Reason.PEER_FAILED, f"{source.address} answers with no tensors: {error}") from error
    if not {tensor.id for tensor in found} <= wanted.keys():
        raise PreconditionFailed(Reason.PEER_FAILED, f"{source.address} answers with tensors that were not asked for")
    for tensor in found:
        wanted[tensor.id].expected.check(tensor.described)
    token, bundled = reply.grant.token, tuple(found[1:])
    return Put(
        found[0].id, found[0].described, token=token, request_id=first.request_id, bundled=bundled, tenant=first.tenant
    )


async def give_back(remote: RemoteStores, release: Release, trace: str) -> int | KVGrpcError:
    """Tells the source that its tensors are wanted no more. Returns how many it kept, or why it was not told."""
    assert release.source is not None, "somebody keeps them"
    names = [name_to_proto(name) for name in release.names]
    request = tensor_pb2.ReleaseTensorsRequest(transfer_key=release.key, names=names, tenant=release.tenant)
    try:
        reply = await remote.release(release.source, request, GIVE_BACK_S, trace)
    except KVGrpcError as error:
        return error.untraced()
    return reply.released_count
