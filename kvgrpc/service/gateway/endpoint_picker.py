"""The endpoint picker: Envoy asks it by `ext_proc` where an HTTP request goes, as Kubernetes' inference gateway does.

The request goes to the decode engine of a pair. A header names the prefill engine, for what stands before the decode
engine and drives both, such as llm-d's sidecar. Without a pair the request goes to a decode engine that computes all of
it. The engines are chosen when the headers are there: bodies and answers pass unread.

Envoy's request headers come from clients, so headers that this picker sets are replaced or removed.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import islice
from typing import Any

from google.protobuf.struct_pb2 import Struct

from kvgrpc.envoy.v1 import ext_proc_pb2 as ext_proc
from kvgrpc.errors import InvalidRequest, KVGrpcError, Reason, note
from kvgrpc.fleet.directory import Directory, EngineState
from kvgrpc.fleet.entry import EngineRole
from kvgrpc.fleet.pairing import NoPair, PairRequest
from kvgrpc.service import telemetry
from kvgrpc.service.callers import METADATA
from kvgrpc.service.fleet.reader import FleetReader, PickOutcome
from kvgrpc.service.gateway.http_endpoints import HttpEndpoints
from kvgrpc.service.identity.gate import CALLER
from kvgrpc.service.span_makers import TRACEPARENT
from kvgrpc.wire.answers import readable_trace

PROCESS = "envoy.service.ext_proc.v3.ExternalProcessor/Process"
"""Full name of the RPC."""
DESTINATION = "x-gateway-destination-endpoint"
"""Header, and key of the load balancer's metadata, with the endpoint to which Envoy sends the request."""
PREFILLER = "x-prefiller-host-port"
"""Header with the endpoint of the prefill engine."""
SUBSET_FILTER, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
"""Name and key of the metadata with the endpoints that the gateway allows."""
TRIES = 3
"""Number of engines that are picked for a request, if the names of their hosts have no address."""
HEADERS_MAX = 128
"""Number of headers of a request among which its trace context is looked for."""
UNAVAILABLE = 503
"""Status of an HTTP request that no engine can take."""

_NONE, _WHOLE = 0, 4
"""Envoy's modes of a body: not sent, and sent in pieces that are sent back."""
_IN_PLACE = 2
"""Envoy's number for a header that takes the place of one that is there."""


class EndpointPicker:
    """Answers Envoy from a reader of the fleet. `model_name`: model of the engines to choose from; empty: any."""

    def __init__(self, reader: FleetReader, endpoints: HttpEndpoints, model_name: str) -> None:
        self._reader, self._endpoints, self._model_name = reader, endpoints, model_name

    async def Process(  # noqa: N802 - the name of the RPC
        self, requests: AsyncIterator[object], _: object
    ) -> AsyncIterator[ext_proc.ProcessingResponse]:
        """Serves one HTTP request. The stream ends with the last part that Envoy needs back."""
        modes = ext_proc.ProtocolConfiguration(request_body_mode=_WHOLE, response_body_mode=_NONE)
        answers = self._first_answer
        async for message in requests:
            if not isinstance(message, ext_proc.ProcessingRequest):
                raise InvalidRequest(Reason.INVALID_FIELD, "a message of ext_proc cannot be read")
            if message.HasField("protocol_config"):
                modes = message.protocol_config
            if message.observability_mode:
                continue  # Envoy waits for no reply
            if message.WhichOneof("request") is None:
                continue
            if message.HasField("request_headers"):
                answer, answers = answers, self._answer
                yield await answer(message)
            else:
                yield _passed(message, modes)
            if _is_last(message, modes):
                return

    async def _first_answer(self, message: ext_proc.ProcessingRequest) -> ext_proc.ProcessingResponse:
        """Answers the headers, and makes the span of the stream: it ends with its first reply."""
        trace = _trace(message) if telemetry.enabled() else ""
        began, failure, error_type = telemetry.CAME_AT.get() or time.perf_counter(), "", ""
        try:
            answer = await self._answer(message)
        except Exception as error:
            failure, error_type = repr(error), type(error).__name__
            raise
        else:
            if answer.HasField("immediate_response"):
                failure, error_type = answer.immediate_response.details, f"{UNAVAILABLE}"
            return answer
        finally:
            telemetry.stream_answered(PROCESS, trace, began, failure, error_type)

    async def _answer(self, message: ext_proc.ProcessingRequest) -> ext_proc.ProcessingResponse:
        """Answers the headers of a request, and counts the choice."""
        routed = await self._route(message)
        self._reader.picks[_outcome(routed)] += 1
        return routed

    async def _route(self, message: ext_proc.ProcessingRequest) -> ext_proc.ProcessingResponse:
        """Returns where the request goes, or the refusal that its client gets."""
        try:
            reading = await self._reader.reading()
            outside = await self._outside(reading.directory, _allowed(message))
            for _ in range(TRIES):
                wanted = PairRequest(model_name=self._model_name, tenant=CALLER.get().tenant, exclude=outside)
                _, found = await self._reader.pick_pair(wanted)
                decode, prefill = (None, None) if isinstance(found, NoPair) else (found.decode, found.prefill)
                decode = decode or reading.picker.pick_alone(wanted, asyncio.get_running_loop().time())
                if decode is None:
                    return _refusal(found.reason)
                if endpoint := await self._endpoints.of(decode.entry, EngineRole.DECODE):
                    before = "" if prefill is None else await self._endpoints.of(prefill.entry, EngineRole.PREFILL)
                    return _routed(endpoint, before)
                outside |= {decode.entry.engine_id}
        except KVGrpcError as error:
            return _refusal(str(error))
        return _refusal(f"the names of {TRIES} engines' hosts have no address")

    async def _outside(self, directory: Directory, allowed: frozenset[str] | None) -> frozenset[str]:
        """Returns the ids of healthy engines without a rule, and of those to which the gateway sends no requests. What
        it allows need not name engines that prefill alone: they get no requests from it.
        """
        now = asyncio.get_running_loop().time()
        healthy = [one.entry for one in directory if directory.state(one, now) is EngineState.HEALTHY]
        outside = {entry.engine_id for entry in healthy if not self._endpoints.has_rule(entry)}
        if allowed is not None:
            receive = [entry for entry in healthy if entry.role is not EngineRole.PREFILL]
            endpoints = await asyncio.gather(*(self._endpoints.of(entry, EngineRole.DECODE) for entry in receive))
            pairs = zip(receive, endpoints, strict=True)
            outside |= {entry.engine_id for entry, endpoint in pairs if endpoint not in allowed}
        return frozenset(outside)


def _trace(message: ext_proc.ProcessingRequest) -> str:
    """Returns the trace context of Envoy's own call, else that of the request; empty if there is no readable one, or
    more than one.
    """
    if own := telemetry.traceparent_of(METADATA.get()):
        return own
    headers = islice(message.request_headers.headers.headers, HEADERS_MAX)
    found = [one.raw_value or one.value.encode() for one in headers if one.key == TRACEPARENT]
    return readable_trace(found[0].decode("ascii", "replace")) if len(found) == 1 else ""


def _routed(endpoint: str, before: str) -> ext_proc.ProcessingResponse:
    """Returns the answer that sends a request to an endpoint. `before`: that of its prefill engine; empty: none."""
    named = {DESTINATION: endpoint} | ({PREFILLER: before} if before else {})
    mutation = ext_proc.HeaderMutation(
        set_headers=[
            ext_proc.HeaderValueOption(
                header=ext_proc.HeaderValue(key=name, raw_value=value.encode()), append_action=_IN_PLACE
            )
            for name, value in named.items()
        ],
        remove_headers=[] if before else [PREFILLER],
    )
    metadata = Struct()
    metadata.update({"envoy.lb": {DESTINATION: endpoint}})
    response = ext_proc.CommonResponse(header_mutation=mutation, clear_route_cache=True)
    return ext_proc.ProcessingResponse(
        request_headers=ext_proc.HeadersResponse(response=response), dynamic_metadata=metadata
    )


def _outcome(answer: ext_proc.ProcessingResponse) -> PickOutcome:
    """Returns what an answer to the headers of a request says."""
    if answer.HasField("immediate_response"):
        return PickOutcome.NONE
    alone = answer.request_headers.response.header_mutation.remove_headers
    return PickOutcome.ALONE if alone else PickOutcome.PAIR


def _allowed(message: ext_proc.ProcessingRequest) -> frozenset[str] | None:
    """Returns the endpoints that the gateway allows; None: all."""
    hint = message.metadata_context.filter_metadata
    if SUBSET_FILTER not in hint or SUBSET not in hint[SUBSET_FILTER].fields:
        return None
    value = hint[SUBSET_FILTER].fields[SUBSET]
    rows = [one.string_value for one in value.list_value.values] or value.string_value.split(",")
    return frozenset(row.strip() for row in rows if row.strip())


def _refusal(why: str) -> ext_proc.ProcessingResponse:
    """Returns the answer without an engine. Envoy's log has the reason; the client, who may be anybody, has not."""
    response = ext_proc.ImmediateResponse(body=b"no engine takes this request now: come back later", details=note(why))
    response.status.code = UNAVAILABLE
    return ext_proc.ProcessingResponse(immediate_response=response)


def _passed(message: ext_proc.ProcessingRequest, modes: ext_proc.ProtocolConfiguration) -> ext_proc.ProcessingResponse:
    """Returns the answer that leaves a part of the request, or of its answer, as it is."""
    kind = message.WhichOneof("request") or ""
    passed = ext_proc.ProcessingResponse()
    part: Any = getattr(passed, kind)
    part.SetInParent()
    if kind in {"request_body", "response_body"}:
        body: ext_proc.HttpBody = getattr(message, kind)
        mode = modes.request_body_mode if kind == "request_body" else modes.response_body_mode
        part.response.SetInParent()
        if mode == _WHOLE:
            piece = part.response.body_mutation.streamed_response
            piece.body, piece.end_of_stream = body.body, body.end_of_stream
    return passed


def _is_last(message: ext_proc.ProcessingRequest, modes: ext_proc.ProtocolConfiguration) -> bool:
    """Returns whether Envoy needs no later part back: the rest of the request, or an answer that it has let go."""
    waits = modes.response_body_mode == _WHOLE
    match message.WhichOneof("request"):
        case "request_headers":
            return not waits and bool(message.request_headers.end_of_stream or modes.request_body_mode == _NONE)
        case "request_body":
            return not waits and bool(message.request_body.end_of_stream)
        case "request_trailers":
            return not waits
        case "response_headers":
            return not waits or bool(message.response_headers.end_of_stream)
        case "response_body":
            return not waits or bool(message.response_body.end_of_stream)
    return True
