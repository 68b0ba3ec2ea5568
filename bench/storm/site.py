"""P, D and the router before them, for one connector."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.pairs import bind, forked, side_channel
from bench.storm.options import KVGRPC, PUSH
from bench.storm.schedule import ANSWER_TOKENS_MAX, PROMPT_TOKENS_MAX
from kvgrpc.client import connect_sync
from kvgrpc.errors import KVGrpcError
from tests.vllm.engines import BLOCK_TOKENS, CHUNK_TOKENS, SEQUENCES, START_S, Engines, wait_until
from tests.vllm.processes import end, runs, tree_of
from tests.vllm.servers import Server, example_router, healthy, new_server, ours, usual_router

FLAGS = (
    "--max-model-len", str(PROMPT_TOKENS_MAX + ANSWER_TOKENS_MAX), "--block-size", str(BLOCK_TOKENS),
    "--max-num-batched-tokens", str(CHUNK_TOKENS), "--max-num-seqs", str(SEQUENCES),
)  # fmt: skip
# vLLM's answers to one prompt depend, in the last bits, on the rest of the batch. With bfloat16 two tokens are so often
# equally likely that other tokens would come; with float32 they are not.
EXACT = ("--dtype", "float32")


@dataclass(frozen=True)
class Shape:
    """The settings of a site."""

    connector: str
    mode: str
    policy: str
    """vLLM's kv_load_failure_policy: what an engine does if its KV does not come."""
    blocks: int
    """Number of blocks in each pool."""


@dataclass
class EnginePlace:
    """An engine that may die, and starts again at the same addresses."""

    server: Server
    engines: Engines
    core: int
    transfer: Mapping[str, Any]
    environment: Mapping[str, str]
    flags: Sequence[str]
    _life: ExitStack = field(default_factory=ExitStack)
    _pid: int = 0

    def start(self) -> None:
        """Starts the engine, without waiting until it is up."""
        one = forked(self.engines, self.server, self.core, self.transfer, self.environment, self.flags)
        self._pid = self._life.enter_context(one).pid

    def wait(self) -> None:
        """Waits until it serves."""
        wait_until(lambda: healthy(self.server.url), lambda: f"server {self.server.name}", START_S)
        if self.transfer.get("kv_connector") == "NixlConnector":
            bind(self._pid, self.core, self.core)

    def kill(self) -> None:
        """Kills the engine at once, with everything that it started."""
        tree = tree_of(self._pid)
        end(tree)
        wait_until(lambda: not any(map(runs, tree)))
        self.stop()
        log = self.engines.folder / f"http-{self.server.name}.log"
        log.rename(log.with_suffix(f".{self._pid}.log"))

    def stop(self) -> None:
        self._life.close()


@dataclass(frozen=True)
class StormSite:
    """Both engines of one connector, and the router before them."""

    p: EnginePlace
    d: EnginePlace
    router: str
    shape: Shape

    def held(self) -> dict[str, int]:
        """Returns the blocks that are not free, by vLLM's last step or by kvgrpc's pins, whichever are more."""
        return {name: self._held(place.server) for name, place in (("P", self.p), ("D", self.d))}

    def _held(self, server: Server) -> int:
        # One block is not of the pool: vLLM's own, which is never free.
        in_use = round(server.counted("vllm:kv_cache_usage_perc") * (self.shape.blocks - 1))
        if self.shape.connector != KVGRPC:
            return in_use
        with connect_sync(server.lead) as lead:
            return max(in_use, *(group.pinned_block_count for group in lead.pool_status().groups))

    def reclaimed(self) -> tuple[int, int] | None:
        """Returns the leases reclaimed since each lead began, and those of them whose reader came later; None without
        kvgrpc.
        """
        if self.shape.connector != KVGRPC:
            return None
        found = [0, 0]
        for place in (self.p, self.d):
            with connect_sync(place.server.lead) as lead:
                counts = lead.status().counts
            found[0] += counts.reclaimed_lease_count
            found[1] += counts.reclaimed_in_vain_count
        return found[0], found[1]

    def look(self) -> str:
        """Returns what is held now, as text. An engine that is dead or starting says nothing."""
        found = []
        for name, place in (("P", self.p), ("D", self.d)):
            with suppress(OSError, KVGrpcError):
                found.append(f"{name}:{self._held(place.server)}")
        return "held " + " ".join(found)


@contextmanager
def site(engines: Engines, shape: Shape) -> Iterator[StormSite]:
    """Runs a site, and yields it once it is up. A pull uses vllm-router as its users run it, a push examples/router,
    which sends both legs at once.
    """
    flags = (*FLAGS, *EXACT, "--num-gpu-blocks-override", str(shape.blocks))
    with ExitStack() as stack:
        places = []
        for core, (name, role) in enumerate((("P", "kv_producer"), ("D", "kv_consumer"))):
            server, environment = new_server(f"{name}-{shape.connector}"), {}
            if shape.connector == KVGRPC:
                transfer = ours(server)
            else:
                transfer, environment = {"kv_connector": "NixlConnector", "kv_role": role}, side_channel()
            transfer["kv_load_failure_policy"] = shape.policy
            places.append(EnginePlace(server, engines, core, transfer, environment, flags))
            stack.callback(places[-1].stop)
            places[-1].start()
        p, d = places
        p.wait()
        d.wait()
        yield StormSite(p, d, stack.enter_context(_router(p.server, d.server, engines.folder, shape)), shape)


@contextmanager
def _router(p: Server, d: Server, folder: Path, shape: Shape) -> Iterator[str]:
    log = folder / f"router-{shape.connector}.log"
    with example_router(p, d, log, PUSH) if shape.mode == PUSH else usual_router(p, d, log) as url:
        yield url
