"""The demo's run: a router that sends each prompt through both engines and compares with one engine that does both."""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvgrpc import client
from kvgrpc.demo.processes import DemoFailed, EngineProcess, engine, server
from kvgrpc.demo.spans import Receiver, Span, receiver
from kvgrpc.v1 import transfer_pb2

STORY = (
    "A decode server needs the keys and values that a prefill server computed. It shows a grant, learns which blocks "
    "hold them, reads those blocks, and asks whether they were its own to read from the first byte to the last. Only "
    "then does it use them. A lease that ran out, a server that restarted, a block that was given to somebody else: "
    "each of them ends the transfer, and no token comes of it. "
)
PROMPTS = (
    ("below a block", "Hello, KV!"),
    ("two blocks", "Thirty-one bytes and one start."),
    ("ragged", "The lease is a promise with an end, and the end is known from the start."),
    ("long", STORY),
    ("prefix held", STORY + "And yet most of it was here before."),
)
TOKENS = 24
SPANS_TIMEOUT_S = 5.0
SPANS = frozenset({"kvgrpc.send", "kvgrpc.receive"})
"""What the two servers say of each transfer."""
RETURNED_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Options:
    """What the demo is asked to do."""

    corrupt: bool = False
    """Change a received block before decoding: the comparison must notice."""
    swap_grants: bool = False
    """Give two requests each other's grants: both must fail."""


@dataclass(frozen=True)
class PromptResult:
    """One prompt, both ways."""

    name: str
    prompt_tokens: int
    tokens_equal: bool
    tokens: list[int]
    reference: list[int]
    blocks: int = 0
    nbytes: int = 0
    data_path: str = ""
    ms: dict[str, float] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Result:
    """The whole demo."""

    prompts: list[PromptResult]
    leases_left: int
    pinned_blocks_left: int
    trace_id: str
    trace: list[Span]

    @property
    def identical(self) -> bool:
        clean = not self.leases_left and not self.pinned_blocks_left
        return clean and all(prompt.tokens_equal for prompt in self.prompts)

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "identical": self.identical,
            "prompts": [
                {
                    "name": p.name,
                    "tokens_equal": p.tokens_equal,
                    "prompt_tokens": p.prompt_tokens,
                    "blocks": p.blocks,
                    "bytes": p.nbytes,
                    "datapath": p.data_path,
                    "ms": p.ms,
                    "error": p.error,
                }
                for p in self.prompts
            ],
            "leases_left": self.leases_left,
            "pinned_blocks_left": self.pinned_blocks_left,
            "trace_id": self.trace_id,
        }


async def run(data_path: str, options: Options) -> Result:
    """Starts everything, runs every prompt, ends everything. Raises DemoFailed when a process does not do its part."""
    async with started(data_path) as stage:
        return await stage.run(options)


class Stage:
    """Servers, engines and the receiver of spans, started. What one run leaves at D, the next one finds there."""

    def __init__(self, engines: list[EngineProcess], clients: list[client.Client], spans: Receiver) -> None:
        self._engines = engines
        self._clients = clients
        self._spans = spans

    async def run(self, options: Options) -> Result:
        """Runs every prompt."""
        router = _Router(options, self._engines, self._clients)
        prompts = await router.run_all()
        leases, pins = await router.leftovers()
        trace = await _trace(self._spans, router.last_span)
        return Result(prompts, leases, pins, router.last_span.trace_id, trace)


@asynccontextmanager
async def started(data_path: str) -> AsyncIterator[Stage]:
    """Starts everything, and ends it."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgrpc-demo-")))
        spans, environment = await stack.enter_async_context(receiver())
        addresses = [
            await stack.enter_async_context(server(folder, name, data_path, environment)) for name in ("P", "D")
        ]
        engines = await asyncio.gather(
            *(
                stack.enter_async_context(engine(name, folder / f"{name}.sock" if name != "reference" else None))
                for name in ("P", "D", "reference")
            )
        )
        clients = [await stack.enter_async_context(client.connect(address)) for address in addresses]
        yield Stage(engines, clients, spans)


class _Router:
    """Relays grants from P to D, unread, as routers do."""

    def __init__(self, options: Options, engines: list[EngineProcess], clients: list[client.Client]) -> None:
        self._options = options
        self._prefill, self._decode, self._reference = engines
        self._clients = clients
        self._spans: dict[int, Span] = {}
        """The router's own span of each request: the root of its trace."""

    async def run_all(self) -> list[PromptResult]:
        if not self._options.swap_grants:
            return [await self._one(index, *prompt) for index, prompt in enumerate(PROMPTS)]
        first, second = PROMPTS[2:4]
        one, two = await self._hand_over(0, first[1]), await self._hand_over(1, second[1])
        return [await self._finish(0, *first, two), await self._finish(1, *second, one)]

    async def leftovers(self) -> tuple[int, int]:
        """Leases and pinned blocks at both servers, once everything that is on its way back has come."""
        async with asyncio.timeout(RETURNED_TIMEOUT_S):
            for server_client in self._clients:
                for transfer in (await server_client.list_transfers()).transfers:
                    await server_client.wait(transfer.transfer_id, returned=True)
        counts = [(await c.status()).counts for c in self._clients]
        return sum(c.leases for c in counts), sum(c.pinned_blocks for c in counts)

    async def _one(self, index: int, name: str, prompt: str) -> PromptResult:
        return await self._finish(index, name, prompt, await self._hand_over(index, prompt))

    async def _hand_over(self, index: int, prompt: str) -> dict[str, Any]:
        """Prefill at P; its answer is what a router relays."""
        key = os.urandom(16).hex()
        labels = self._labels(index)
        answer = await self._prefill.ask(op="prefill", prompt=prompt, transfer_key=key, ttl_s=20.0, **labels)
        return answer | {"transfer_key": key}

    async def _finish(self, index: int, name: str, prompt: str, handed: dict[str, Any]) -> PromptResult:
        """Decode at D from the transferred KV, and in one engine alone."""
        reference = await self._reference.ask(op="generate", prompt=prompt, count=TOKENS)
        answer = await self._decode.ask(
            op="decode",
            prompt=prompt,
            count=TOKENS,
            corrupt=self._options.corrupt,
            **handed,
            **self._labels(index),
        )
        self._spans[index].end_ns = time.time_ns()
        prompt_tokens = len(prompt.encode()) + 1
        tokens, expected = answer.get("tokens", []), reference["tokens"]
        result = PromptResult(name, prompt_tokens, tokens == expected, tokens, expected, error=answer.get("error", ""))
        if result.error:
            await self._clients[0].cancel(bytes.fromhex(handed["transfer_key"]), message=result.error)
            return result
        reply = await self._clients[1].get_transfer(answer["transfer_id"])
        return _with_transfer(result, reply.transfer)

    @property
    def last_span(self) -> Span:
        """The router's span of the last request."""
        return self._spans[max(self._spans)]

    def _labels(self, index: int) -> dict[str, str]:
        """Request id and trace context. Every request has a trace of its own, with the router's span as its root."""
        span = self._spans.get(index)
        if span is None:
            started = time.time_ns()
            span = Span("request", "router", os.urandom(16).hex(), os.urandom(8).hex(), "", started, started, {})
            self._spans[index] = span
        return {"request_id": f"prompt-{index}", "traceparent": f"00-{span.trace_id}-{span.span_id}-01"}


def _with_transfer(result: PromptResult, transfer: transfer_pb2.Transfer) -> PromptResult:
    phases = {p.name: p.duration.seconds * 1e3 + p.duration.nanos / 1e6 for p in transfer.phases}
    return PromptResult(
        result.name,
        result.prompt_tokens,
        result.tokens_equal,
        result.tokens,
        result.reference,
        transfer.blocks,
        transfer.bytes,
        transfer.paths[0].data_path if transfer.paths else "",
        {name: round(phases.get(name, 0.0), 3) for name in ("queue", "handshake", "open", "wire", "settle")},
    )


async def _trace(spans: Receiver, root: Span) -> list[Span]:
    """The tree under the router's span, once both servers have exported theirs. Raises DemoFailed if they do not."""
    spans.spans.append(root)
    try:
        async with asyncio.timeout(SPANS_TIMEOUT_S):
            while SPANS - spans.names(root.trace_id):  # noqa: ASYNC110 - once, at the end
                await asyncio.sleep(0.05)
    except TimeoutError:
        missing = ", ".join(sorted(SPANS - spans.names(root.trace_id)))
        raise DemoFailed(f"no span {missing} came for trace {root.trace_id} within {SPANS_TIMEOUT_S:g} s") from None
    return spans.tree(root.trace_id)
