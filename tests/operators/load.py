"""Leads under a load that moves KV in every way, so that every metric has something to show.

P and D have pools in plain text, and are in a registry that `kvgrpc fleet` reads. T has a store of named tensors,
mutual TLS and a table of roles.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

from examples.certs import Authority
from kvgrpc.client import Client, Credentials, connect
from kvgrpc.errors import KVGrpcError
from kvgrpc.v1 import common_pb2, tensor_pb2
from tests.operators.programs import Missing
from tests.operators.prometheus import Target
from tests.registry.etcds import MISSING, RunningEtcd
from tests.service.conftest import starting
from tests.service.engines import Engine, ServeProcess
from tests.service.fleet.published import fleet as running_fleet

METRICS = ("--metrics", "127.0.0.1:0")
TOKENS = list(range(64))
BLOCKS = 4
LAYERS = 2
PAGE = 4096
ROLES = """[[callers]]
name = "spiffe://test/engine"
roles = ["engine", "router", "operator"]

[[callers]]
name = "spiffe://test/stranger"
roles = ["viewer"]
"""
SECURED = f"[tensors]\nstore_bytes = {64 * PAGE}\npage_bytes = {PAGE}\n"


def target_of(name: str, process: ServeProcess, ca: Path | None = None) -> Target:
    """Returns where the metrics of a lead are."""
    return Target(name, str(process.wait_ready()["metrics"]), ca)


def spiffe(name: str) -> tuple[x509.UniformResourceIdentifier, x509.DNSName]:
    """Returns the names of a caller's certificate."""
    return x509.UniformResourceIdentifier(f"spiffe://test/{name}"), x509.DNSName("localhost")


def credentials(folder: Path) -> Credentials:
    """Returns the credentials of a folder of TLS files."""
    return Credentials(ca=folder / "ca.crt", cert=folder / "tls.crt", key=folder / "tls.key")


@dataclass(frozen=True)
class Leads:
    """The three leads."""

    p: Engine
    d: Engine
    t: ServeProcess
    fleet: dict[str, str]
    """Addresses of a `kvgrpc fleet` whose registry has P and D."""
    folder: Path
    """Folder with the TLS files of T's callers."""

    @property
    def targets(self) -> list[Target]:
        """Where their metrics are."""
        ca = self.folder / "engine/ca.crt"
        plain = [target_of("p", self.p.process), target_of("d", self.d.process), Target("fleet", self.fleet["metrics"])]
        return [*plain, target_of("t", self.t, ca)]


@contextmanager
def leads(folder: Path, **environment: str) -> Iterator[Leads]:
    """Starts the leads, and ends them. Raises Missing."""
    if MISSING:
        raise Missing(MISSING)
    authority = Authority()
    for name in ("engine", "stranger"):
        authority.issue(folder / name, spiffe(name))
    (folder / "roles.toml").write_text(ROLES)
    flags = (*METRICS, "--data-paths", "shm,cma")
    secured = (
        "--listen",
        "127.0.0.1:0",
        "--advertise",
        "localhost:0",
        "--drain-s",
        "0",
        "--data-paths",
        "shm",
        *METRICS,
    )
    etcd = RunningEtcd(folder / "etcd")
    registry = f"etcd://{etcd.address}"
    environment |= {"KVGRPC_FLEET_REGISTRY": registry}
    with ExitStack() as stack:
        stack.callback(etcd.end)
        etcd.start()
        start = stack.enter_context(starting(folder))
        fleet = stack.enter_context(running_fleet(folder / "fleet", "--registry", registry, *METRICS))
        roles = {"p": "prefill", "d": "decode"}
        p, d = start(
            *((*flags, "--engine-id", name, "--fleet-role", role) for name, role in roles.items()), settings="",
            **environment,
        )  # fmt: skip
        tls = ("--tls-dir", str(folder / "engine"), "--roles", str(folder / "roles.toml"), "--engine-id", "t")
        t = ServeProcess(folder / "t", *secured, *tls, settings=SECURED, environment=environment)
        stack.callback(t.end)
        yield Leads(p, d, t, fleet, folder)


@contextmanager
def traced() -> Iterator[str]:
    """Makes calls inside a trace that somebody else records. Yields the trace id."""
    number = secrets.randbits(128)
    context = SpanContext(number, 0x1234, is_remote=False, trace_flags=TraceFlags(1), trace_state=TraceState())
    with trace.use_span(NonRecordingSpan(context)):
        yield f"{number:032x}"


@dataclass(frozen=True)
class Clients:
    """Clients of the three leads, and one of T without a role for what it asks."""

    p: Client
    d: Client
    t: Client
    stranger: Client
    fleet: Client
    p_address: str

    async def pull(self, tokens: list[int] = TOKENS, wanted: list[int] = TOKENS) -> None:
        """Moves a prompt by a pull, or fails for other tokens."""
        made, taken = await asyncio.gather(self.p.allocate(BLOCKS), self.d.allocate(BLOCKS))
        handed = await self.p.finished_blocks(made, tokens)
        await self.d.pull(handed.grant, wanted, blocks=taken)
        if tokens != wanted:
            await self.p.release_lease(handed.grant)
        await asyncio.gather(self.p.free(made), self.d.free(taken))

    async def push(self, *layers: tuple[int, int]) -> None:
        """Moves a prompt by a push: whole, or by ranges of layers."""
        made, taken = await asyncio.gather(self.p.allocate(BLOCKS), self.d.allocate(BLOCKS))
        key = secrets.token_bytes(16)
        source = common_pb2.PeerAddress(address=self.p_address)
        async with asyncio.TaskGroup() as both:
            both.create_task(self.d.receive(key, taken, TOKENS, source))
            if not layers:
                await self.p.push_part(key, made, TOKENS, last=True)
            for some in layers:
                await self.p.push_part(key, made, TOKENS, layers=some, last=some == layers[-1])
        await asyncio.gather(self.p.free(made), self.d.free(taken))

    async def expire(self) -> None:
        """Hands over what nobody fetches."""
        made = await self.p.allocate(1)
        await self.p.finished_blocks(made, TOKENS[:16], ttl_s=0.2)
        await self.p.free(made)

    async def tensor(self) -> None:
        """Keeps a named tensor, offers it, and releases it."""
        key, tensors = secrets.token_bytes(16), self.t.tensors()
        described = tensor_pb2.TensorDescription(dtype="uint8", shape_sizes=[PAGE], nbytes=PAGE)
        made = await self.t.allocate(1)
        await tensors.put(key, "a", described, allocation_id=made.blocks.allocation_id)
        await tensors.get(key, "a", as_offer=True)
        await tensors.release(key)

    async def denied(self) -> None:
        """Asks for what the caller may not."""
        with suppress(KVGrpcError):
            await self.stranger.start_drain()

    async def picked(self) -> None:
        """Asks the fleet for a pair."""
        await self.fleet.fleet().pick_pair()

    async def wait_in_vain(self) -> None:
        """Lets a pull wait for blocks of its own, and cancels it."""
        made = await self.p.allocate(BLOCKS)
        handed = await self.p.finished_blocks(made, TOKENS)
        pulled = await self.d.pull_blocks(handed.grant, TOKENS)
        with suppress(KVGrpcError):
            await self.d.wait(pulled.transfer.transfer_id, timeout_s=2.5)
        await self.d.cancel(pulled.transfer.transfer_id)
        await self.p.free(made)


@asynccontextmanager
async def clients(leads: Leads) -> AsyncIterator[Clients]:
    """Connects to the leads, and to the fleet."""
    async with AsyncExitStack() as stack:
        port = leads.t.wait_ready()["address"].rpartition(":")[2]
        plain = [
            await stack.enter_async_context(connect(address))
            for address in (leads.p.address, leads.d.address, leads.fleet["address"])
        ]
        secured = [
            await stack.enter_async_context(connect(f"localhost:{port}", credentials=credentials(leads.folder / name)))
            for name in ("engine", "stranger")
        ]
        yield Clients(plain[0], plain[1], secured[0], secured[1], plain[2], leads.p.address)


@asynccontextmanager
async def loaded(leads: Leads) -> AsyncIterator[set[str]]:
    """Loads the leads inside the context. Yields the trace ids of what was moved so far."""
    traces: set[str] = set()

    async def again(act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            with traced() as trace_id:
                await act()
            traces.add(trace_id)
            await asyncio.sleep(0.2)

    async with clients(leads) as to:
        acts: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = (
            to.pull, to.push, lambda: to.push((0, 1), (1, LAYERS - 1)), to.expire, to.tensor, to.denied,
            to.wait_in_vain, to.picked, lambda: to.pull(wanted=TOKENS[::-1]),
        )  # fmt: skip
        tasks = [asyncio.create_task(again(act)) for act in acts]
        try:
            yield traces
            for task in tasks:
                if task.done():
                    task.result()  # raises what ended it
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
