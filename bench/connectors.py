"""kvgrpc's connector against vLLM's own NixlConnector: two pairs of vLLM servers on this machine, asked in turn.

    make bench-vllm                        # a table
    make bench-vllm ARGS=--json            # one JSON object on stdout; progress goes to stderr

Each engine is bound to a processor with its whole process tree, prefill to the first, decode to the second. Both pairs
are up all the time. Every repeat asks first one, then the other, with the same prompts; the order alternates.
NixlConnector's engines are stopped (SIGSTOP) while ours are asked. Tokens that decode computed instead of loading would
be no hand-over: vLLM's own counters are read after each case, and a run in which a token was not loaded fails.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientTimeout, TCPConnector

from bench.legs import MEASURES, Legs, Pair, Prompt
from bench.machine import machine
from bench.pairs import OWN, SPINNING, pairs, side_channel
from bench.result import KVGRPC, NIXL, Case, line, show
from tests.vllm.engines import ROOT, START_S, VOCABULARY, write_model
from tests.vllm.servers import bound_to, new_server, ours

RUN_S = 1500.0
"""Maximum duration of a run, in seconds."""
REQUEST_S = 120.0
HITS = "vllm:external_prefix_cache_hits_total"


class Run:
    """All cases over two pairs."""

    def __init__(self, both: dict[str, Pair], legs: Legs, repeats: int) -> None:
        self._pairs = both
        self._legs = legs
        self._repeats = repeats
        self._random = random.Random(0)  # noqa: S311 - the same prompts in every run

    def prompts(self, tokens: int, count: int) -> list[Prompt]:
        """Returns prompts that are all different, so that none is cached."""
        return [self._random.choices(range(3, VOCABULARY), k=tokens) for _ in range(count)]

    async def case(self, measure: str, tokens: int, concurrency: int) -> Case:
        repeats = max(2, self._repeats // (3 if concurrency > 1 else 1))
        seconds: dict[str, list[float]] = {name: [] for name in self._pairs}
        hits = await self._hits()
        for repeat in range(-1, repeats):
            prompts = self.prompts(tokens, concurrency)
            for name in (KVGRPC, NIXL) if repeat % 2 else (NIXL, KVGRPC):
                async with self._alone(name) as pair:
                    found = await MEASURES[measure](self._legs, pair, prompts)
                if repeat >= 0:  # the first one only warms up
                    seconds[name] += found
        for name, count in (await self._hits()).items():
            loaded, asked = count - hits[name], tokens * concurrency * (repeats + 1)
            assert loaded == asked, f"{name}: {loaded:g} of {asked} tokens were loaded by decode"
        p50 = {name: statistics.median(all_s) * 1e3 for name, all_s in seconds.items()}
        worst = {name: max(all_s) * 1e3 for name, all_s in seconds.items()}
        return Case(
            measure, tokens, concurrency, concurrency * repeats, p50[KVGRPC], worst[KVGRPC], p50[NIXL], worst[NIXL],
            p50[KVGRPC] / p50[NIXL], worst[KVGRPC] / p50[KVGRPC],
        )  # fmt: skip

    async def _hits(self) -> dict[str, float]:
        """Returns the number of tokens that each decode engine has loaded."""
        found = {}
        for name in self._pairs:
            async with self._alone(name) as pair:
                found[name] = pair.d.counted(HITS)
        return found

    @asynccontextmanager
    async def _alone(self, name: str) -> AsyncIterator[Pair]:
        """Yields a pair while NixlConnector's engines run only for their own turn: they keep both processors busy when
        idle.
        """
        if name == NIXL:
            self._pairs[NIXL].signal(signal.SIGCONT)
        await self._legs.wake(self._pairs[name])
        try:
            yield self._pairs[name]
        finally:
            if name == NIXL:
                self._pairs[NIXL].signal(signal.SIGSTOP)


def hooks_us(folder: Path, transfer: dict[str, Any]) -> dict[str, float]:
    """Returns the microseconds of the hooks in a step without work, alone on the machine; see bench/hooks.py."""
    command = ["taskset", "-c", "0", sys.executable, "-m", "bench.hooks", str(folder), json.dumps(transfer)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **bound_to(0), **side_channel()}
    with (folder / f"hooks-{transfer['kv_connector']}.log").open("w") as log:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=log, timeout=START_S, check=True, text=True
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def say(text: str) -> None:
    """Prints progress to stderr."""
    print(text, file=sys.stderr, flush=True)


async def measure(options: argparse.Namespace, folder: Path) -> list[Case]:
    """Measures all cases."""
    say("starting four vLLM servers and two routers: a minute or two")
    began = time.monotonic()
    with pairs(folder, options.data_paths, options.spinning) as both:
        say(f"all up after {time.monotonic() - began:.0f} s")
        # vLLM's server closes connections after 5 s. The client closes them a little earlier.
        client = ClientSession(
            timeout=ClientTimeout(REQUEST_S), raise_for_status=True, connector=TCPConnector(keepalive_timeout=2)
        )
        async with client as session, asyncio.timeout(RUN_S):
            run, cases = Run(both, Legs(session), options.repeats), []
            for name in options.measures:
                for concurrency in options.concurrency:
                    for tokens in options.prompt_tokens:
                        cases.append(await run.case(name, tokens, concurrency))
                        say(line(cases[-1]))
            return cases


def words(of: type) -> Any:
    """Returns a parser for a list of values, separated by commas."""
    return lambda text: [of(word) for word in text.split(",") if word]


def main() -> None:
    """Measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--repeats", type=int, default=15, help="of each case with one request; a third with more")
    parser.add_argument("--prompt-tokens", type=words(int), default=[200, 900, 3500])
    parser.add_argument("--concurrency", type=words(int), default=[1, 8])
    parser.add_argument("--measures", type=words(str), default=list(MEASURES))
    parser.add_argument("--data-paths", type=words(str), default=["cma", "nixl"], help="of kvgrpc; best first")
    parser.add_argument(
        "--spinning", choices=SPINNING, default=OWN, help="processor of NIXL's own threads, in its engines"
    )
    parser.add_argument("--no-hooks", action="store_true", help="leave out what hooks take of a step")
    parser.add_argument("--folder", type=Path, help="keep logs here")
    options = parser.parse_args()
    # A run that is ended from outside still ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    place = machine()
    with tempfile.TemporaryDirectory(prefix="kvgrpc-bench-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_model(folder / "model")
        hooks = {}
        if not options.no_hooks:
            say("hooks: one engine in one process with each connector")
            hooks[KVGRPC] = hooks_us(folder, ours(new_server("hooks"), data_paths=options.data_paths))
            hooks[NIXL] = hooks_us(folder, {"kv_connector": "NixlConnector", "kv_role": "kv_both"})
        cases = asyncio.run(measure(options, folder)) if options.measures else []
    show(options, place, cases, hooks)


if __name__ == "__main__":
    main()
