"""Calls of TensorService as messages, for the RPCs and for the session."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from google.protobuf.message import Message

from kvgrpc.core.values.owners import ANONYMOUS, ENGINE, meet, tenant_of
from kvgrpc.errors import invalid
from kvgrpc.service.tensors.staging_store import StagingStore
from kvgrpc.session.v1 import session_pb2
from kvgrpc.v1 import tensor_pb2
from kvgrpc.wire import tensors as wire
from kvgrpc.wire.answers import readable_trace
from kvgrpc.wire.values import grant, pool_blocks


async def put(
    staging: StagingStore, request: tensor_pb2.PutTensorRequest, trace: str, caller: str
) -> tensor_pb2.PutTensorResponse:
    """Serves PutTensor."""
    lead = staging.lead
    asked = wire.put(request, lead.config.limits)
    found = await staging.put(replace(asked, tenant=_tenant(request.tenant, caller)), trace, caller)
    first, *bundled = [wire.row(tensor, lead.runner.time(), lead.runner.node.state.transfers) for tensor in found]
    return tensor_pb2.PutTensorResponse(header=lead.header(), tensor=first, bundled_tensors=bundled)


async def get(
    staging: StagingStore, request: tensor_pb2.GetTensorRequest, trace: str, caller: str
) -> tensor_pb2.GetTensorResponse:
    """Serves GetTensor."""
    asked = replace(wire.get(request), tenant=_tenant(request.tenant, caller))
    got = await staging.get(asked, trace, caller)
    lead = staging.lead
    header = lead.header()
    first, *bundled = [wire.row(tensor, lead.runner.time(), lead.runner.node.state.transfers) for tensor in got.tensors]
    made = tensor_pb2.GetTensorResponse(header=header, tensor=first, bundled_tensors=bundled)
    if got.pages is not None:
        allocation_id, ids = got.pages
        made.pages.CopyFrom(pool_blocks((ids,), header.incarnation, allocation_id))
    else:
        made.grant.CopyFrom(grant(got.token))
    return made


async def release(
    staging: StagingStore, request: tensor_pb2.ReleaseTensorsRequest, trace: str, caller: str = ANONYMOUS
) -> tensor_pb2.ReleaseTensorsResponse:
    """Serves ReleaseTensors."""
    asked = replace(wire.release(request), tenant=_tenant(request.tenant, caller))
    here = staging.release(asked, caller)
    there = await staging.give_back(asked, trace) if asked.source is not None else 0
    return tensor_pb2.ReleaseTensorsResponse(
        header=staging.lead.header(), released_count=here, source_released_count=there
    )


def _tenant(stated: str, caller: str) -> str:
    """Returns the tenant of a call: the caller's, or what a caller of none states. Raises InvalidRequest."""
    own = tenant_of(caller)
    if not meet(own, stated):
        raise invalid("tenant", "is the caller's own, or left out")
    return own or stated


_OF_SESSION: dict[str, Callable[[StagingStore, Any, str, str], Awaitable[Message]]] = {
    "put_tensor": put,
    "get_tensor": get,
    "release_tensors": release,
}


def of_session(staging: StagingStore, kind: str, call: session_pb2.Call) -> Callable[[], Awaitable[Message]]:
    """Returns the function that serves a session's call about tensors. `kind`: the field of its request."""
    return lambda: _OF_SESSION[kind](staging, getattr(call, kind), readable_trace(call.traceparent), ENGINE)
