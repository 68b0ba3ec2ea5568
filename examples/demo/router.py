"""The demo's router: it sends each request through P and D, and relays grants unread, as routers do."""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from examples.demo.processes import EngineProcess
from examples.demo.results import Left, Options, PromptResult, Say, silent
from examples.demo.spans import Span
from kvgrpc import client
from kvgrpc.client import name_of
from kvgrpc.v1 import transfer_pb2
from kvgrpc.v1.common_pb2 import DataPath, TransferPhase

TOKENS = 24
LEASE_TTL_S = 20.0
RETURNED_TIMEOUT_S = 10.0
Answer = dict[str, Any]


@dataclass
class Request:
    """One request to serve."""

    name: str
    prompt: str
    count: int = TOKENS
    """Number of tokens to decode."""
    prefill: Answer = field(default_factory=dict)
    """Further fields for P."""
    decode: Answer = field(default_factory=dict)
    """Further fields for D."""


@dataclass(frozen=True)
class Handed:
    """Answer of the first engine for the second: P's grant for a pull, D's for a push."""

    transfer_key: str
    answer: Answer


@dataclass(frozen=True)
class Served:
    """A request that both engines have served."""

    result: PromptResult
    prefill: Answer
    decode: Answer


class Router:
    """Serves requests, and compares each with one engine that does both."""

    def __init__(
        self,
        options: Options,
        engines: Sequence[EngineProcess],
        clients: Sequence[client.Client],
        say: Say = silent,
    ) -> None:
        self.options = options
        self._say = say
        self._prefill, self._decode, self._reference = engines
        self._clients = clients
        self._spans: dict[str, Span] = {}
        """The router's own span of each request: the root of its trace."""
        self._expected: dict[str, list[int]] = {}
        """Tokens that the single engine made of each prompt."""

    async def serve(self, request: Request) -> Served:
        """Serves one request, from prompt to tokens."""
        return await self.finish(request, await self.begin(request))

    async def begin(self, request: Request) -> Handed:
        """Starts a request. Pull: P computes and hands over. Push: D reserves blocks."""
        if request.prompt not in self._expected:
            # Asked first, so that the single engine's time is not part of the way from P to D.
            alone = await self._reference.ask(op="generate", prompt=request.prompt, count=request.count)
            self._expected[request.prompt] = alone["tokens"]
        key = os.urandom(16).hex()
        labels = self._labels(request) | {"transfer_key": key}
        if self.options.push:
            answer = await self._decode.ask(op="reserve", prompt=request.prompt, **labels)
        else:
            answer = await self._prefill.ask(
                op="prefill", prompt=request.prompt, ttl_s=LEASE_TTL_S, **request.prefill, **labels
            )
        return Handed(key, answer)

    async def finish(self, request: Request, handed: Handed, *, layerwise: bool | None = None) -> Served:
        """Finishes a request. Pull: D decodes from what it pulls. Push: P computes and pushes, and D decodes from what
        arrives.
        """
        labels = self._labels(request) | {"transfer_key": handed.transfer_key}
        decode = {"op": "decode", "prompt": request.prompt, "count": request.count, **request.decode, **labels}
        if "error" in handed.answer:
            computed = decoded = handed.answer
        elif self.options.push:
            layers = self.options.layerwise if layerwise is None else layerwise
            computed, decoded = await asyncio.gather(
                self._push(request, handed, layerwise=layers, labels=labels), self._decode.ask(**decode)
            )
        else:
            relayed = handed.answer["kv_transfer_params"]
            computed, decoded = handed.answer, await self._decode.ask(kv_transfer_params=relayed, **decode)
        self._spans[request.name].end_ns = time.time_ns()
        result = await self._result(request, handed, computed, decoded)
        self._say(result.as_line())
        return Served(result, computed, decoded)

    async def leftovers(self) -> Left:
        """Returns the leftovers, once all memory has been returned."""
        async with asyncio.timeout(RETURNED_TIMEOUT_S):
            for server_client in self._clients:
                for transfer in (await server_client.list_transfers()).transfers:
                    await server_client.wait(transfer.transfer_id, returned=True)
        counts = [(await server_client.status()).counts for server_client in self._clients]
        used = [(await engine.ask(op="usage"))["used_blocks"] for engine in (self._prefill, self._decode)]
        return Left(sum(c.lease_count for c in counts), sum(c.pinned_block_count for c in counts), sum(used))

    async def forget(self) -> None:
        """Empties the prefix caches of P and D, so that later requests move the same blocks each time."""
        for engine in (self._prefill, self._decode):
            await engine.ask(op="forget")

    @property
    def last_span(self) -> Span:
        """The router's span of the last request."""
        return list(self._spans.values())[-1]

    async def _push(self, request: Request, handed: Handed, *, layerwise: bool, labels: Answer) -> Answer:
        """Does P's part of a push. D already waits for it, so D must learn if nothing comes."""
        grant = handed.answer["kv_transfer_params"]
        answer = await self._prefill.ask(
            op="prefill", prompt=request.prompt, push_to=grant, layerwise=layerwise, **request.prefill, **labels
        )
        if "error" in answer:
            await self._clients[1].cancel(bytes.fromhex(handed.transfer_key), message=answer["error"])
        return answer

    async def _result(self, request: Request, handed: Handed, computed: Answer, decoded: Answer) -> PromptResult:
        tokens, expected = decoded.get("tokens", []), self._expected[request.prompt]
        prompt_tokens = len(request.prompt.encode()) + 1
        result = PromptResult(request.name, prompt_tokens, tokens == expected, tokens, expected)
        if "error" in decoded:
            for server_client in self._clients:
                await server_client.cancel(bytes.fromhex(handed.transfer_key), message=decoded["error"])
            return replace(result, error=decoded["error"])
        visible_ms = round((decoded["received_s"] - computed["prefilled_s"]) * 1e3, 3)
        transfer = (await self._clients[1].get_transfer(decoded["transfer_id"])).transfer
        paths = transfer.paths
        if not paths:  # P moved the bytes, so P knows the data path
            paths = (await self._clients[0].get_transfer(transfer.peer.transfer_id)).transfer.paths
        result = replace(
            result, visible_ms=visible_ms, data_path=name_of(DataPath, paths[0].data_path) if paths else ""
        )
        return _with_transfer(result, transfer, self.options.phases)

    def _labels(self, request: Request) -> dict[str, str]:
        """Returns the request id and the trace context. Every request has its own trace, with the router's span as its
        root.
        """
        span = self._spans.get(request.name)
        if span is None:
            started = time.time_ns()
            span = Span("request", "router", os.urandom(16).hex(), os.urandom(8).hex(), "", started, started, {})
            self._spans[request.name] = span
        return {"request_id": request.name, "traceparent": f"00-{span.trace_id}-{span.span_id}-01"}


def _with_transfer(result: PromptResult, transfer: transfer_pb2.Transfer, names: Sequence[str]) -> PromptResult:
    phases = {
        name_of(TransferPhase, p.phase): p.duration.seconds * 1e3 + p.duration.nanos / 1e6 for p in transfer.phases
    }
    return replace(
        result,
        blocks=transfer.block_count,
        nbytes=transfer.total_bytes,
        ms={name: round(phases.get(name, 0.0), 3) for name in names},
    )
