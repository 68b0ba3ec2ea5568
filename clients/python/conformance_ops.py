"""Carries out the executor's requests with the client. Only this file of the executor uses kvgrpc.client."""

import asyncio
import platform
from base64 import b64decode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from clients.python.conformance_streams import Calls, Opened, Queued
from kvgrpc.client import (
    CleanedUp,
    CleanUp,
    Client,
    Credentials,
    EngineUnreachable,
    HistoryLost,
    IncarnationChanged,
    check_transfer,
    clean_up,
    connect,
    move,
    name_of,
    redacted,
)
from kvgrpc.errors import Aborted, DeadlineExceeded, KVGrpcError, Reason
from kvgrpc.v1 import (
    admin_pb2,
    fleet_pb2,
    handoff_pb2,
    handshake_pb2,
    lease_pb2,
    pool_pb2,
    scheduler_pb2,
    tensor_pb2,
    transfer_pb2,
)
from kvgrpc.v1.common_pb2 import ResponseHeader

Json = dict[str, Any]
FILES = (admin_pb2, fleet_pb2, handoff_pb2, handshake_pb2, lease_pb2, pool_pb2, scheduler_pb2, tensor_pb2, transfer_pb2)
METHODS: dict[str, MethodDescriptor] = {
    f"{service.full_name}/{method.name}": method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
CLOSE_S = 5.0


class Ops:
    """Holds clients by server, and streams and keepers by name."""

    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}
        self._streams: dict[str, Opened] = {}
        self._keepers: dict[str, AsyncExitStack] = {}
        self._held: dict[str, list[Any]] = {}

    async def perform(self, request: Json) -> Json:
        """Returns the answer to one request."""
        op: Callable[[Json], Awaitable[Json]] | None = getattr(self, f"op_{request['op']}", None)
        if op is None:
            raise LookupError(f"there is no op {request['op']}")
        return await op(request)

    async def close_all(self) -> None:
        """Ends everything."""
        for keeper in list(self._keepers):
            await self.op_stopKeeping({"keeper": keeper})
        for name in list(self._clients):
            await self.op_close({"server": name})

    # ---- connections

    async def op_hello(self, _: Json) -> Json:
        return {"language": "python", "version": platform.python_version()}

    async def op_connect(self, request: Json) -> Json:
        await self.op_close(request)
        shown = Credentials(
            **request.get("tls", {}), token=request.get("token", ""), token_file=request.get("tokenFile", "")
        )
        self._clients[request["server"]] = connect(request["address"], credentials=shown)
        return {}

    async def op_close(self, request: Json) -> Json:
        name = request["server"]
        for stream in [key for key, one in self._streams.items() if one.server == name]:
            await self._streams.pop(stream).close()
        client = self._clients.pop(name, None)
        if client is not None:
            await client.close()
        return {}

    # ---- calls

    async def op_call(self, request: Json) -> Json:
        client, method = self._clients[request["server"]], METHODS[request["method"]]
        message = parsed(method.input_type, request["request"])
        calls = Calls(client, request.get("metadata", {}))
        timeout_s = request.get("deadlineS")
        return {"reply": as_json(await calls.unary(method, message, timeout_s))}

    async def op_open(self, request: Json) -> Json:
        client, method = self._clients[request["server"]], METHODS[request["method"]]
        message = parsed(method.input_type, request["request"]) if "request" in request else None
        call = Calls(client, request.get("metadata", {})).stream(method, message)
        opened = self._streams[request["stream"]] = Opened(request["server"], call)
        return {"metadata": await opened.metadata()}

    async def op_send(self, request: Json) -> Json:
        opened = self._streams[request["stream"]]
        await opened.send(lambda method: parsed(method.input_type, request["request"]))
        return {}

    async def op_finish(self, request: Json) -> Json:
        await self._streams[request["stream"]].finish()
        return {}

    async def op_next(self, request: Json) -> Json:
        try:
            message = await self._streams[request["stream"]].next(request.get("timeoutS", 10.0))
        except TimeoutError:
            return {"timeout": True}
        return {"end": True} if message is None else {"message": as_json(message)}

    async def op_cancel(self, request: Json) -> Json:
        await self._streams[request["stream"]].close()
        return {}

    # ---- the wrapper's own

    async def op_wait(self, request: Json) -> Json:
        client, transfer_id = self._clients[request["server"]], request["transferId"]
        returned = request.get("until", "ENDED") == "RETURNED"
        try:
            transfer = await client.wait(transfer_id, returned=returned, timeout_s=request.get("timeoutS", 10.0))
        except DeadlineExceeded as error:
            if "method" in error.metadata:  # of a call; the end of the wait itself names none
                raise
            reply = await client.get_transfer(transfer_id)
            return {"transfer": as_json(reply.transfer), "conditionMet": False}
        return {"transfer": as_json(transfer), "conditionMet": True}

    async def op_watch(self, request: Json) -> Json:
        client = self._clients[request["server"]]
        after = None
        if "after" in request:
            point = {"eventSeq": request["after"]["eventSeq"], "incarnation": request["after"]["incarnation"]}
            after = parsed(ResponseHeader.DESCRIPTOR, point)
        wanted = parsed(transfer_pb2.TransferFilter.DESCRIPTOR, request.get("filter", {}))
        which = {field.name: value for field, value in wanted.ListFields()}
        events = client.watch(after=after, **which)
        self._streams[request["stream"]] = Opened(request["server"], Queued(_messages(events), events.aclose))
        return {}

    async def op_watchEngine(self, request: Json) -> Json:  # noqa: N802 - named as the op
        events = self._clients[request["server"]].watch_engine()
        replies = (event async for event in events if not isinstance(event, EngineUnreachable))
        self._streams[request["stream"]] = Opened(request["server"], Queued(replies, events.aclose))
        return {}

    async def op_keepAlive(self, request: Json) -> Json:  # noqa: N802 - named as the op
        client, stack = self._clients[request["server"]], AsyncExitStack()
        held: list[Any] = []
        for row in request["leases"]:
            ref = parsed(lease_pb2.LeaseRef.DESCRIPTOR, row)
            lease = ref.grant if ref.HasField("grant") else ref.lease_id
            held.append(await stack.enter_async_context(client.keep_alive(lease, release=False)))
        self._keepers[request["keeper"]], self._held[request["keeper"]] = stack, held
        return {}

    async def op_kept(self, request: Json) -> Json:
        held = self._held[request["keeper"]][request["index"]]
        with suppress(TimeoutError):
            async with asyncio.timeout(request.get("timeoutS", 10.0)):
                await held.wait_over()
        return {"state": lease_state(held)}

    async def op_stopKeeping(self, request: Json) -> Json:  # noqa: N802 - named as the op
        self._held.pop(request["keeper"], None)
        await self._keepers.pop(request["keeper"]).aclose()
        return {}

    async def op_pull(self, request: Json) -> Json:
        asked = parsed(handoff_pb2.PullBlocksRequest.DESCRIPTOR, request["request"])
        transfer = await self._clients[request["server"]].pull(
            asked.grant if asked.HasField("grant") else asked.transfer_id,
            asked.content if asked.HasField("content") else None,
            blocks=asked.destination.blocks,
            timeout_s=request["timeoutS"],
        )
        return {"transfer": as_json(check_transfer(transfer))}

    async def op_move(self, request: Json) -> Json:
        asked = parsed(handoff_pb2.HandOver.DESCRIPTOR, request["request"])
        moved = await move(
            self._clients[request["server"]],
            self._clients[request["to"]],
            asked.blocks,
            asked.content,
            request_id=request.get("requestId", ""),
            timeout_s=request["timeoutS"],
        )
        return {"transfer": as_json(moved.transfer), "blocks": as_json(moved.blocks)}

    async def op_redacted(self, request: Json) -> Json:
        return {"text": redacted(parsed(METHODS[request["method"]].input_type, request["request"]))}

    async def op_cleanUp(self, request: Json) -> Json:  # noqa: N802 - named as the op
        sides = [
            CleanUp(
                self._clients[side["server"]],
                side["transferId"] if "transferId" in side else b64decode(side["transferKey"]),
                free_allocation_ids=side.get("freeAllocationIds", ()),
            )
            for side in request["sides"]
        ]
        return {"outcomes": [outcome(one) for one in await clean_up(sides, message=request.get("message", ""))]}


async def _messages(events: AsyncIterator[Any]) -> AsyncIterator[Message]:
    """Yields the messages of the client's watch. The watch marks a new life and continues. The protocol of executors
    has an error for a new life, which is raised here.
    """
    async for event in events:
        if isinstance(event, IncarnationChanged):
            raise Aborted(Reason.INCARNATION_CHANGED, f"the engine's life {event.previous} is over")
        lost = isinstance(event, HistoryLost)
        yield transfer_pb2.WatchTransfersResponse(header=event.header, history_lost=True) if lost else event


def lease_state(held: Any) -> str:
    """Returns a LeaseState without its prefix."""
    state = getattr(held, "state", None)
    if state:
        return name_of(lease_pb2.LeaseState, state).upper()
    reason = held.reason
    return "LIVE" if reason is None else str(reason).removeprefix("LEASE_")


def outcome(one: CleanedUp) -> str:
    """Returns the result of a side: its outcome, or why it failed."""
    if isinstance(one, KVGrpcError):
        return str(one.reason)
    return transfer_pb2.CancelOutcome.Name(one.outcome).removeprefix("CANCEL_OUTCOME_")


def parsed(descriptor: Any, value: Json) -> Any:
    """Returns a message from its JSON."""
    return json_format.ParseDict(value, GetMessageClass(descriptor)())


def as_json(message: Message) -> Json:
    """Returns a message as JSON."""
    made: Json = json_format.MessageToDict(message)
    return made


def error_of(error: KVGrpcError) -> Json:
    """Returns a typed error in the form that the runner reads."""
    made: Json = {
        "code": error.code,
        "reason": str(error.reason),
        "message": error.message,
        "next": str(error.next or ""),
        "engineId": error.engine_id,
        "incarnation": str(error.incarnation or ""),
        "metadata": error.metadata,
        "violations": [{"field": one.field, "description": one.description} for one in error.violations],
    }
    return made if error.retry_delay_s is None else {**made, "retryDelayS": error.retry_delay_s}
