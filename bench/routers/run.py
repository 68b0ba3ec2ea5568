"""Runs an engine that is alone, then two servers of each mode, with one router after the other before them."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.pairs import forked
from bench.routers.cases import HANG_UPS, REFUSED, Case, cases
from bench.routers.client import OK, ask, hang_up
from bench.routers.kinds import NAMES, ROUTERS, TENSORS, TOY_PROXY
from bench.routers.model import write_tokenizer
from bench.routers.result import Outcome, Row, outcome, row
from bench.routers.starting import EDGE_CASES, Front, Missing, Programs, RouterSite, start
from kvgrpc.client import connect_sync
from tests.vllm.engines import BLOCK_TOKENS, START_S, Engines, free_port, wait_until, write_model
from tests.vllm.servers import Server, healthy, new_server, ours

# vLLM's answers to one prompt depend, in the last bits, on the rest of the batch. With float32 no two tokens are
# equally likely.
_BLOCKS = ("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", "400")
FLAGS = ("--max-model-len", "2048", "--dtype", "float32", "--no-skip-tokenizer-init", *_BLOCKS)
TTL_S = 10.0
"""TTL of leases in seconds. Most routers end no lease."""
ANNOUNCE_WAIT_S = "3"
"""Time that decode waits for a prefill that says nothing of the request, in seconds."""
CAME_S, REST_S = 2.0, 60.0
"""Timeouts in seconds: until a counter shows what came before an answer, and until nothing is held any more."""

Expected = Mapping[Case, str]


@dataclass(frozen=True)
class WantedParts:
    """The parts to run."""

    routers: Sequence[str]
    modes: Sequence[str]
    programs: Programs


@dataclass
class Ran:
    """The results so far."""

    rows: list[Row] = field(default_factory=list)
    missing: dict[tuple[str, str], str] = field(default_factory=dict)
    """Reason why a router was not available, by router and mode."""
    edge_cases: dict[str, str] = field(default_factory=dict)
    """Result of vLLM's own test of edge cases through its toy proxy, by mode."""


def run(wanted: WantedParts, folder: Path, ran: Ran) -> None:
    """Runs everything wanted. The results are in `ran` even if the run is ended in the middle."""
    write_model(folder / "model")
    write_tokenizer(folder / "model")
    routers = [router for router in ROUTERS if router.name in wanted.routers]
    asked = {one.name: [case for case in cases(NAMES.index(one.name)) if one.serves(case)] for one in routers}
    with ExitStack() as stack:
        engines = Engines(folder, "bench/server_process.py")
        stack.callback(engines.stop)
        say("an engine that is alone answers first")
        expected = _alone(engines, asked)
        for mode in wanted.modes:
            say(f"{mode}: two servers start")
            with _servers(engines, mode) as site:
                for name, all_of_it in asked.items():
                    try:
                        with start(name, site, wanted.programs) as front:
                            ran.rows.append(_one(name, mode, site, front, all_of_it, expected))
                            if name == TOY_PROXY:
                                ran.edge_cases[mode] = _edge_cases(mode, site, front, wanted.programs)
                    except Missing as why:
                        ran.missing[name, mode] = str(why)
                        say(f"{mode}, {name}: {why}")


def say(text: str) -> None:
    """Prints progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def _alone(engines: Engines, asked: Mapping[str, Sequence[Case]]) -> Expected:
    """Returns the answers of an engine without a connector to each prompt, alone."""
    server, found = new_server("alone"), {}
    with forked(engines, server, 0, {}, {}, (*FLAGS, "--no-enable-prefix-caching")):
        wait_until(lambda: healthy(server.url), lambda: "the engine that is alone", START_S)
        for one in (one for all_of_it in asked.values() for case in all_of_it for one in case.alone):
            if one not in found:
                said = ask(server.url, one, {})
                if said.status != OK:
                    raise RuntimeError(f"the engine that is alone answered {said.status} to a request for {one.path}")
                (found[one],) = said.texts
    return found


@contextmanager
def _servers(engines: Engines, mode: str) -> Iterator[RouterSite]:
    """Runs P and D, which register at a port where a router may listen."""
    discovery_port = free_port()
    with ExitStack() as stack:
        pair = []
        for core, (name, role) in enumerate((("P", "kv_producer"), ("D", "kv_consumer"))):
            server = new_server(f"{name}-{mode}")
            proxy = {"proxy_ip": "127.0.0.1", "proxy_port": str(discovery_port), "http_port": str(server.port)}
            transfer = ours(server, mode=mode, ttl_s=TTL_S, **proxy) | {"kv_role": role}
            environment = {"KVGRPC_LIMITS_ANNOUNCE_WAIT_S": ANNOUNCE_WAIT_S}
            stack.enter_context(forked(engines, server, core, transfer, environment, FLAGS))
            pair.append(server)
        for server in pair:
            wait_until(lambda s=server: healthy(s.url), lambda s=server: f"server {s.name}", START_S)  # type: ignore[misc]
        p, d = pair
        yield RouterSite(p, d, discovery_port, engines.folder)


def _one(router: str, mode: str, site: RouterSite, front: Front, asked: Sequence[Case], expected: Expected) -> Row:
    """Sends all requests to one router."""
    outcomes = []
    for case in asked:
        if case.kind == HANG_UPS:
            hang_up(front.url, case, front.headers)
            outcomes.append(Outcome(case.kind, "", right=True, came=False))
            continue
        before = _received(site.d)
        said = ask(front.url, case, front.headers)
        came = said.status == OK and _came(site.d, before)
        texts = [] if case.kind == REFUSED else [expected[one] for one in case.alone]
        outcomes.append(outcome(case, said, texts, came=came))
        if case.kind != REFUSED and not (outcomes[-1].right and came):
            say(f"{mode}, {router}: {case.kind}: {said.status}, right {outcomes[-1].right}, came {came}")
    found = row(router, mode, outcomes, _held(site, mode))
    say(f"{mode}, {router}: {found.answers} of {found.sent}, wrong {found.wrong}, loaded {found.loaded:.0%}")
    return found


def _edge_cases(mode: str, site: RouterSite, front: Front, programs: Programs) -> str:
    """Runs vLLM's own test, and returns its result."""
    ports = {"PREFILL": site.p.url, "DECODE": site.d.url, "PROXY": front.url}
    environment = {f"{name}_PORT": url.rpartition(":")[2] for name, url in ports.items()}
    environment |= {f"{name}_HOST": "127.0.0.1" for name in ports}
    program = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--noconftest", "-p", "no:cacheprovider"]
    try:
        command = [*program, programs.script(EDGE_CASES)]
    except Missing as why:
        say(f"{mode}, vLLM's own edge cases: {why}")
        return "not run"
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    (site.folder / f"edge-cases-{mode}.log").write_text(done.stdout + done.stderr)
    said = "passed" if done.returncode == 0 else "failed"
    say(f"{mode}, vLLM's own edge cases: {said}")
    return said


def _received(server: Server) -> float:
    return server.counted("vllm:kvgrpc_received_tokens_total")


def _came(server: Server, before: float) -> bool:
    try:
        wait_until(lambda: _received(server) > before, timeout_s=CAME_S)
    except AssertionError:
        return False
    return True


def _held(site: RouterSite, mode: str) -> dict[str, int]:
    """Returns what either lead still holds once nothing more is released."""

    def now() -> dict[str, int]:
        found: dict[str, int] = {}
        for server in (site.p, site.d):
            counts = server.held()
            if mode == TENSORS:
                with connect_sync(server.lead) as lead:
                    status: Any = lead.tensors().status()
                counts |= {"tensor_count": int(status.tensor_count), "offered_count": int(status.offered_count)}
            found |= {f"{server.name} {name}": count for name, count in counts.items() if count}
        return found

    try:
        wait_until(lambda: now() == {}, timeout_s=REST_S)
    except AssertionError:
        return now()
    return {}
