"""Store to store: the calls that the lead of one engine makes at another's."""

import asyncio
from collections.abc import Callable, Sequence

from kvgrpc.core.tensors.calls import Get, LeadAddress, Put, Release
from kvgrpc.core.tensors.descriptions import NamedTensor, TensorId
from kvgrpc.core.tensors.waits import RETRY_DELAY_S
from kvgrpc.errors import DeadlineExceeded, Exhausted, KVGrpcError, PreconditionFailed, Reason, Unavailable
from kvgrpc.service.tensors.remote import RemoteStores
from kvgrpc.v1 import tensor_pb2
from kvgrpc.wire.tensors import (
    bundled_to_proto,
    described,
    description_to_proto,
    expected_to_proto,
    name_to_proto,
    wanted_to_proto,
)
from kvgrpc.wire.values import claims_of, duration, grant

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
        await asyncio.sleep(delay_s)
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
    request = tensor_pb2.GetTensorRequest(
        tensor=name_to_proto(get.id), expected=expected_to_proto(get.expected), as_offer=True,
        timeout=duration(timeout_s), request_id=get.request_id, tenant=get.tenant,
    )  # fmt: skip
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
    return Put(
        found[0].id, found[0].described, token=reply.grant.token, request_id=first.request_id,
        bundled=tuple(found[1:]), tenant=first.tenant,
    )  # fmt: skip


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
