"""Two pairs of vLLM servers, one with each connector, and a router before each pair."""

import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.legs import Pair
from bench.result import KVGRPC, NIXL
from tests.vllm.engines import START_S, Engines, free_port, wait_until
from tests.vllm.processes import end, runs, tree_of
from tests.vllm.servers import Server, arguments, bound_to, healthy, new_server, ours, usual_router

FLAGS = ("--max-model-len", "4096", "--num-gpu-blocks-override", "400", "--max-num-seqs", "16")
STOP_S = 20.0
SPINS_S = 3.0
OWN, PREFILL, SHIPPED = SPINNING = ("own", "prefill", "shipped")
"""Processors of NixlConnector's threads that never wait: their engine's own, prefill's for both, or as it binds
them.
"""


def side_channel() -> dict[str, str]:
    """Returns the environment of NixlConnector's side channel to its peers."""
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}


@dataclass(frozen=True)
class Forked:
    """A server, and its process."""

    server: Server
    pid: int


@contextmanager
def forked(
    engines: Engines,
    server: Server,
    core: int,
    transfer: Mapping[str, Any],
    environment: Mapping[str, str],
    flags: Sequence[str] = FLAGS,
) -> Iterator[Forked]:
    """Starts a server with its whole tree on one processor, without waiting until it is up."""
    own = {**bound_to(core), **environment}
    request = {"arguments": arguments(server, engines.folder, transfer, flags), "cores": [core], "environment": own}
    mine, theirs = socket.socketpair()
    with mine, theirs:
        pid = engines.fork(request, theirs, engines.folder / f"http-{server.name}.log")
        try:
            yield Forked(server, pid)
        finally:
            tree = tree_of(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            with suppress(AssertionError):
                wait_until(lambda: not any(map(runs, tree)), timeout_s=STOP_S)
            end([process for process in tree if runs(process)])


@contextmanager
def paired(p: Forked, d: Forked, log: Path) -> Iterator[Pair]:
    """Runs a router before two servers. Resumes the servers at the end, so that they can be ended."""
    with usual_router(p.server, d.server, log) as router:
        pair = Pair(p.server, d.server, router, (*tree_of(p.pid), *tree_of(d.pid)))
        try:
            yield pair
        finally:
            pair.signal(signal.SIGCONT)


def bind(root: int, core: int, spinning: int) -> None:
    """Binds all threads of a tree to `core`, and those that never wait to `spinning`. NixlConnector itself binds its
    workers, prefill's too, to the last processor; decode is there as well, which slows both down.
    """
    for pid in tree_of(root):
        for thread in (int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()):
            with suppress(OSError):
                os.sched_setaffinity(thread, {spinning if thread != pid and spins(pid, thread) else core})


def spins(pid: int, thread: int) -> bool:
    """Returns True for NIXL's own thread, which has been busy since its start, by then for half a minute."""
    row = Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()
    return int(row[11]) + int(row[12]) > SPINS_S * os.sysconf("SC_CLK_TCK")


@contextmanager
def pairs(folder: Path, data_paths: Sequence[str], spinning: str) -> Iterator[dict[str, Pair]]:
    """Yields both pairs, when all their servers and routers are up. `spinning` is the processor of NIXL's own
    threads.
    """
    with ExitStack() as stack:
        engines = Engines(folder, "bench/server_process.py")
        stack.callback(engines.stop)
        found: dict[str, list[Forked]] = {KVGRPC: [], NIXL: []}
        for core, (name, role) in enumerate([("P", "kv_producer"), ("D", "kv_consumer")]):
            server = new_server(f"{name}-{KVGRPC}")
            of_kvgrpc = forked(engines, server, core, ours(server, data_paths=list(data_paths)), {})
            found[KVGRPC].append(stack.enter_context(of_kvgrpc))
            transfer = {"kv_connector": "NixlConnector", "kv_role": role}
            of_nixl = forked(engines, new_server(f"{name}-{NIXL}"), core, transfer, side_channel())
            found[NIXL].append(stack.enter_context(of_nixl))
        for all_of_them in found.values():
            for one in all_of_them:
                wait_until(lambda s=one.server: healthy(s.url), lambda s=one.server: s.name, START_S)  # type: ignore[misc]
        for core, one in enumerate(found[NIXL]):
            if spinning != SHIPPED:
                bind(one.pid, core, core if spinning == OWN else 0)
        yield {name: stack.enter_context(paired(p, d, folder / f"router-{name}.log")) for name, (p, d) in found.items()}
