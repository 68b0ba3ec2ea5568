"""Runs the demo: every prompt through both engines, then a conversation; all compared with one engine alone."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from examples.certs import Authority, usual_names
from examples.demo.chat import converse
from examples.demo.processes import DemoFailed, EngineProcess, engine, server
from examples.demo.results import Options, PromptResult, Result, Say, silent
from examples.demo.router import Request, Router
from examples.demo.spans import Receiver, Span, receiver
from kvgrpc import client

STORY = (
    "A decode server needs the keys and values that a prefill server computed. It shows a grant, learns which blocks "
    "hold them, reads those blocks, and asks whether they were its own to read from the first byte to the last. Only "
    "then does it use them. A lease that ran out, a server that restarted, a block that was given to another request: "
    "each of them ends the transfer, and no token comes of it. "
)
PROMPTS = (
    ("short", "Hello, KV!"),
    ("two blocks", "Thirty-one bytes and one start."),
    ("ragged", "The lease is a promise with an end, and the end is known from the start."),
    ("long", STORY),
    ("prefix held", STORY + "And yet most of it was here before."),
)
WARM_UP = "Is anybody there?"
PAGES = ("pages", "Once more. " + STORY * 3)
"""A long prompt. Layers gain only if moving a prompt takes longer than the messages about it."""
SPANS_TIMEOUT_S = 5.0
SPANS = frozenset({"kvgrpc.send", "kvgrpc.receive"})
"""Names of the spans that the two servers export for each transfer."""


async def run(data_path: str, options: Options, say: Say = silent, *, tls: bool = False) -> Result:
    """Starts, runs and ends everything. Raises DemoFailed if a process fails to do its part.

    `say` gets a line for each step.
    """
    async with started(data_path, say, tls=tls) as stage:
        result = await stage.run(options, say)
        say("stopping all processes")
    return result


class Stage:
    """The started servers, engines and receiver of spans."""

    def __init__(self, engines: Sequence[EngineProcess], clients: Sequence[client.Client], spans: Receiver) -> None:
        self._engines = engines
        self._clients = clients
        self._spans = spans

    async def run(self, options: Options, say: Say = silent) -> Result:
        """Runs every prompt and the conversation, starting with empty prefix caches."""
        router = Router(options, self._engines, self._clients, say)
        await router.forget()
        if options.push:
            # The first push between two servers also pays for set-up that later ones reuse.
            await router.serve(Request("warm-up", WARM_UP))
        if options.swap_grants:
            prompts = await _swapped(router)
        else:
            prompts = await (_compared(router) if options.layerwise else _all(router))
        span = router.last_span
        broken = options.corrupt or options.swap_grants
        chat = [] if broken else await converse(router, self._clients[1])
        say("waiting until both servers have taken back what was lent, and for the trace")
        left = await router.leftovers()
        return Result(options, prompts, chat, left, span.trace_id, await _trace(self._spans, span))


@asynccontextmanager
async def started(data_path: str, say: Say = silent, *, tls: bool = False) -> AsyncIterator[Stage]:
    """Starts everything, and ends it. With `tls` the two servers and the router have certificates of a new CA."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgrpc-demo-")))
        spans, environment = await stack.enter_async_context(receiver())
        say(f"starting two servers{' under mutual TLS' if tls else ''}: P for prefill, D for decode")
        authority = Authority() if tls else None
        files = {
            name: authority.issue(folder / name, usual_names(name)) if authority else None
            for name in ("P", "D", "router")
        }
        addresses = [
            await stack.enter_async_context(server(folder, name, data_path, environment, files[name]))
            for name in ("P", "D")
        ]
        say(f"P serves at {addresses[0]}, D at {addresses[1]}")
        say("starting three engines: P's, D's, and one that does both; each imports torch, which takes some seconds")
        engines = await asyncio.gather(
            *(
                stack.enter_async_context(engine(name, folder / f"{name}.sock" if name != "reference" else None))
                for name in ("P", "D", "reference")
            )
        )
        shown = client.Credentials(dir=folder / "router" if tls else "")
        clients = [await stack.enter_async_context(client.connect(address, credentials=shown)) for address in addresses]
        say("all engines are ready: each prompt is computed by one engine, and then by P and D together")
        yield Stage(engines, clients, spans)


async def _all(router: Router) -> list[PromptResult]:
    return [(await router.serve(request)).result for request in _requests(router.options, PROMPTS)]


async def _compared(router: Router) -> list[PromptResult]:
    """Runs every prompt whole, and then layer by layer, each time into empty caches."""
    requests = _requests(router.options, (*PROMPTS, PAGES))
    whole = [await router.finish(request, await router.begin(request), layerwise=False) for request in requests]
    await router.forget()
    layered = [await router.serve(replace(request, name=f"{request.name}, by layer")) for request in requests]
    return [
        replace(
            two.result,
            name=one.result.name,
            tokens_equal=one.result.tokens_equal and two.result.tokens_equal,
            whole_visible_ms=one.result.visible_ms,
            error=one.result.error or two.result.error,
        )
        for one, two in zip(whole, layered, strict=True)
    ]


def _requests(options: Options, prompts: Sequence[tuple[str, str]]) -> list[Request]:
    return [Request(name, prompt, decode={"corrupt": options.corrupt}) for name, prompt in prompts]


async def _swapped(router: Router) -> list[PromptResult]:
    """Runs two requests, each with the grant of the other."""
    first, second = (Request(name, prompt) for name, prompt in PROMPTS[2:4])
    one, two = await router.begin(first), await router.begin(second)
    return [(await router.finish(first, two)).result, (await router.finish(second, one)).result]


async def _trace(spans: Receiver, root: Span) -> list[Span]:
    """Returns the tree under the router's span, once both servers have exported theirs. Raises DemoFailed if they do
    not.
    """
    spans.spans.append(root)
    try:
        async with asyncio.timeout(SPANS_TIMEOUT_S):
            while SPANS - spans.names(root.trace_id):  # noqa: ASYNC110 - once, at the end
                await asyncio.sleep(0.05)
    except TimeoutError:
        missing = ", ".join(sorted(SPANS - spans.names(root.trace_id)))
        raise DemoFailed(f"no span {missing} came for trace {root.trace_id} within {SPANS_TIMEOUT_S:g} s") from None
    return spans.tree(root.trace_id)
