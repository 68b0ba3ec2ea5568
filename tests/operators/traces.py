"""Requests of every kind are whole traces in a real Jaeger: no orphan, and little time that no span accounts for."""

import asyncio
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from kvgrpc.client import Client, connect
from kvgrpc.errors import KVGrpcError
from kvgrpc.v1 import common_pb2, tensor_pb2
from tests.operators.accounting import CALL, accounted, gaps
from tests.operators.jaeger import Jaeger, Span, collecting
from tests.operators.load import METRICS
from tests.operators.programs import Programs
from tests.service.conftest import starting
from tests.service.engines import Engine, wait_until

POOL = ("--layers", "8", "--kv-heads", "8", "--head-dim", "128", "--blocks", "160")
"""A pool whose blocks have half a megabyte, so that a prompt takes milliseconds to move."""
BLOCKS = 128
TOKENS = list(range(16 * BLOCKS))
LAYERS = 8
PAGE = 1 << 20
STORE = f"[tensors]\nstore_bytes = {64 * PAGE}\npage_bytes = {PAGE}\n"
REPEATS = 3
"""Number of requests of each kind."""
GAP_SHARE = 0.01
"""Minimum share of a call that a stretch has to be reported."""
PAUSE_S = 0.1
"""Time in which an engine computes, in seconds, while another one waits."""


@dataclass
class TracesFound:
    """Traces by what was done and the number of the repetition."""

    traces: dict[tuple[str, int], list[Span]] = field(default_factory=dict)
    services: set[str] = field(default_factory=set)

    def orphans(self) -> list[str]:
        """Returns the spans whose parents did not arrive."""
        found = []
        for (what, _), spans in self.traces.items():
            ids = {span.span_id for span in spans}
            found += [f"{what}: {span.name}" for span in spans if span.parent_id and span.parent_id not in ids]
        return found

    def shares(self) -> dict[str, float]:
        """Returns by what was done the share of its time that spans account for."""
        kinds: dict[str, list[list[Span]]] = {}
        for (what, _), spans in self.traces.items():
            kinds.setdefault(what, []).append(spans)
        return {what: accounted(traces) for what, traces in kinds.items()}

    def gaps(self) -> list[str]:
        """Returns the longest stretches that no span accounts for, longest first."""
        found = [(gap.share, f"{what}: {gap}") for (what, _), spans in self.traces.items() for gap in gaps(spans)]
        return [text for share, text in sorted(found, reverse=True) if share >= GAP_SHARE]


class Tracer:
    """A client's own tracing."""

    def __init__(self, endpoint: str) -> None:
        self.provider = TracerProvider(resource=Resource.create({"service.name": "client"}))
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, insecure=True)))
        self._tracer = self.provider.get_tracer("client")

    @contextmanager
    def request(self) -> Iterator[str]:
        """Makes calls within one request. Yields its trace id."""
        with self._tracer.start_as_current_span("request") as span:
            yield trace.format_trace_id(span.get_span_context().trace_id)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Marks what the client waits for."""
        with self._tracer.start_as_current_span(CALL):
            yield

    def close(self) -> None:
        """Exports what is left."""
        self.provider.shutdown()


@dataclass(frozen=True)
class Requests:
    """Requests of all kinds, between two engines with pools and two with stores."""

    tracer: Tracer
    p: Client
    d: Client
    p_address: str
    s: Client
    s_address: str
    t: Client
    t_address: str

    async def pull(self, wanted: list[int] = TOKENS) -> None:
        """A prompt is pulled."""
        async with self._blocks() as (made, taken):
            handed = await self.p.finished_blocks(made, TOKENS)
            with self.tracer.call():
                await self.d.pull(handed.grant, wanted, blocks=taken)
            with suppress(KVGrpcError):
                await self.p.release_lease(handed.grant)

    async def pull_other_content(self) -> None:
        """A pull fails, since it asks for other tokens."""
        await self.pull(TOKENS[::-1])

    async def pull_before_blocks(self) -> None:
        """A pull waits for blocks of its own."""
        async with self._blocks() as (made, taken):
            handed = await self.p.finished_blocks(made, TOKENS)
            with self.tracer.call():
                pulled = await self.d.pull_blocks(handed.grant, TOKENS)
                await asyncio.sleep(PAUSE_S)
                await self.d.pull(pulled.transfer.transfer_id, blocks=taken)

    async def pull_too_late(self) -> None:
        """A lease has expired before its reader comes."""
        async with self._blocks() as (made, taken):
            handed = await self.p.finished_blocks(made, TOKENS, ttl_s=0.01)
            await asyncio.sleep(PAUSE_S)
            with self.tracer.call():
                await self.d.pull(handed.grant, TOKENS, blocks=taken)

    async def push(self, *layers: tuple[int, int]) -> None:
        """A prompt is pushed to a reader that waits for it."""
        async with self._blocks() as (made, taken):
            key, source = secrets.token_bytes(16), common_pb2.PeerAddress(address=self.p_address)

            async def receive() -> None:
                with self.tracer.call():
                    await self.d.receive(key, taken, TOKENS, source)

            async with asyncio.TaskGroup() as both:
                both.create_task(receive())
                await asyncio.sleep(PAUSE_S)
                for some in layers:
                    await self.p.push_part(key, made, TOKENS, layers=some, last=some == layers[-1])
                    await asyncio.sleep(PAUSE_S / LAYERS)
                if not layers:
                    await self.p.push_part(key, made, TOKENS, last=True)

    async def push_layers(self) -> None:
        """A prompt is pushed layer by layer, while the next layer is computed."""
        await self.push(*((layer, 1) for layer in range(LAYERS)))

    async def push_fails(self) -> None:
        """A source says that it cannot deliver."""
        async with self._blocks() as (_, taken):
            key, source = secrets.token_bytes(16), common_pb2.PeerAddress(address=self.p_address)

            async def receive() -> None:
                with self.tracer.call():
                    await self.d.receive(key, taken, TOKENS, source)

            async with asyncio.TaskGroup() as both:
                both.create_task(receive())
                await asyncio.sleep(PAUSE_S)
                await self.p.source_failed(key, "preempted for good")

    async def tensor(self) -> None:
        """A consumer waits for a named tensor, which its source then puts there."""
        key, name = secrets.token_bytes(16), "layers.0"

        async def get() -> None:
            with self.tracer.call():
                await self.t.tensors().get(key, name)

        async with asyncio.TaskGroup() as both:
            both.create_task(get())
            await asyncio.sleep(PAUSE_S)
            await self._put(key, name, self.t_address)
        await self.t.tensors().release(key)
        await self.s.tensors().release(key)

    async def tensor_never_comes(self) -> None:
        """A consumer waits for a named tensor in vain."""
        with self.tracer.call(), suppress(KVGrpcError):
            await self.t.tensors().get(secrets.token_bytes(16), "never", within_s=PAUSE_S)

    async def tensor_fetched(self) -> None:
        """A consumer fetches a named tensor that its source keeps."""
        key, name = secrets.token_bytes(16), "layers.1"
        await self._put(key, name)
        with self.tracer.call():
            await self.t.tensors().get(key, name, source=self.s_address)
        await self.t.tensors().release(key)

    async def _put(self, key: bytes, name: str, *to: str) -> None:
        pages = 32
        described = tensor_pb2.TensorDescription(dtype="uint8", shape_sizes=[pages * PAGE], nbytes=pages * PAGE)
        made = await self.s.allocate(pages)
        await self.s.tensors().put(key, name, described, allocation_id=made.blocks.allocation_id, to=to)

    @asynccontextmanager
    async def _blocks(self) -> AsyncIterator[tuple[common_pb2.Blocks, common_pb2.Blocks]]:
        made, taken = await asyncio.gather(self.p.allocate(BLOCKS), self.d.allocate(BLOCKS))
        yield made.blocks, taken.blocks
        await asyncio.gather(self.p.free(made), self.d.free(taken))

    def kinds(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """Returns all kinds of requests."""
        made = (
            self.pull, self.pull_before_blocks, self.pull_other_content, self.pull_too_late, self.push,
            self.push_layers, self.push_fails, self.tensor, self.tensor_fetched, self.tensor_never_comes,
        )  # fmt: skip
        return {one.__name__: one for one in made}


async def make_all(tracer: Tracer, endpoint: str, folder: Path) -> dict[tuple[str, int], str]:
    """Makes requests of all kinds, of leads that export to `endpoint` and have ended then. Returns the trace ids as
    `TracesFound` has them.
    """
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    with starting(folder) as start:
        p, d = start(*((*POOL, *METRICS, "--engine-id", name) for name in "pd"), settings="", **environment)
        s, t = start(*((*METRICS, "--engine-id", name) for name in "st"), settings=STORE, **environment)
        async with AsyncExitStack() as clients:
            to = [await clients.enter_async_context(connect(one.address)) for one in (p, d, s, t)]
            requests = Requests(tracer, to[0], to[1], p.address, to[2], s.address, to[3], t.address)
            await requests.pull()  # the handshake of the two is no part of later pulls
            ids = {}
            for what in product(requests.kinds(), range(REPEATS)):
                with tracer.request() as ids[what]:
                    await requests.kinds()[what[0]]()
        tracer.close()
        await asyncio.to_thread(_end, (p, d, s, t))
    return ids


def _end(engines: Iterable[Engine]) -> None:
    """Ends the leads, which then export their last spans."""
    for engine in engines:
        engine.process.signal(signal.SIGTERM)
    for engine in engines:
        engine.process.wait_exit()


async def check(programs: Programs, folder: Path) -> TracesFound:
    """Makes requests of all kinds, and asks Jaeger for their traces."""
    found = TracesFound()
    with collecting(programs, folder / "jaeger") as jaeger:
        tracer = Tracer(jaeger.endpoint)
        trace.set_tracer_provider(tracer.provider)  # the client makes spans of its own by it
        ids = await make_all(tracer, jaeger.endpoint, folder)
        await asyncio.to_thread(_fetch, jaeger, ids, found)
        found.services = jaeger.services()
    return found


def _fetch(jaeger: Jaeger, ids: dict[tuple[str, int], str], found: TracesFound) -> None:
    """Waits until no further span arrives and no span is without its parent, or until that is no longer likely."""

    def all_there() -> bool:
        before = {name: len(spans) for name, spans in found.traces.items()}
        found.traces = {name: jaeger.trace(trace_id) for name, trace_id in ids.items()}
        now = {name: len(spans) for name, spans in found.traces.items()}
        return now == before and all(now.values()) and not found.orphans()

    with suppress(AssertionError):
        wait_until(all_there, 10.0)
