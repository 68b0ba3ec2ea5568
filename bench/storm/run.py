"""Runs all storms of one run, one connector after the other."""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from bench.storm.alone import alone, right_answers
from bench.storm.client import session
from bench.storm.options import BOTH, CONNECTORS
from bench.storm.outcomes import Expected, Outcome
from bench.storm.result import Found
from bench.storm.schedule import Schedule, schedule
from bench.storm.site import Shape, site
from bench.storm.storm import Storm
from tests.vllm.engines import Engines, write_model


def run(options: argparse.Namespace, folder: Path) -> dict[str, Found]:
    """Returns the results, by connector."""
    plan = schedule(options.seed, options.requests, options.hang_ups, options.kills)
    write_model(folder / "model")
    by_connector = {}
    with ExitStack() as stack:
        engines = Engines(folder, "bench/server_process.py")
        stack.callback(engines.stop)
        say("an engine that is alone answers all prompts first")
        expected = asyncio.run(_right(engines, plan))
        for name in CONNECTORS if options.connector == BOTH else (options.connector,):
            say(f"{name}: P, D and the router start")
            shape = Shape(name, options.mode, options.policy, options.blocks)
            by_connector[name] = asyncio.run(_storm(engines, shape, plan, expected, options.limit_s))
    return by_connector


def say(text: str) -> None:
    """Prints progress to stderr."""
    print(text, file=sys.stderr, flush=True)


async def _right(engines: Engines, plan: Schedule) -> Expected:
    with alone(engines) as server:
        async with session() as http:
            return await right_answers(http, server, plan)


async def _storm(engines: Engines, shape: Shape, plan: Schedule, expected: Expected, limit_s: float) -> Found:
    with site(engines, shape) as place:
        async with session() as http:
            storm = Storm(place, http, expected, say)
            try:
                return await storm.run(plan, limit_s)
            finally:
                _keep(storm.outcomes, engines.folder / f"requests-{shape.connector}.jsonl")


def _keep(outcomes: Sequence[Outcome], path: Path) -> None:
    """Writes a line for each request, with the length of its prompt in place of the prompt."""
    rows = [asdict(one) for one in outcomes]
    for row in rows:
        row["request"]["prompt"] = len(row["request"]["prompt"])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
