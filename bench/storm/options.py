"""The options of `make storm`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.storm.schedule import ANSWER_TOKENS_MAX, MISSED, PROMPT_TOKENS_MAX
from tests.vllm.engines import BLOCK_TOKENS

KVGRPC, NIXL = CONNECTORS = ("kvgrpc", "nixl")
BOTH = "both"
PULL, PUSH = MODES = ("pull", "push")
KILLED_EVERY = 500
BLOCKS_MIN = -(-(PROMPT_TOKENS_MAX + ANSWER_TOKENS_MAX) // BLOCK_TOKENS) + 1
"""Minimum number of blocks: for the longest request, and the one that vLLM keeps."""


def parsed(description: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options, with defaults that depend on others. Exits if they make no storm."""
    parser = _parser(description)
    options = parser.parse_args(arguments)
    options.kills = options.requests // KILLED_EVERY if options.kills is None else options.kills
    wrong = _wrong(options)
    if wrong:
        parser.error(wrong)
    return options


def _parser(description: str) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="make storm", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--json", action="store_true", help="one JSON object on stdout")
    found.add_argument("--requests", type=int, default=2000)
    found.add_argument("--seed", type=int, default=1)
    found.add_argument("--connector", choices=[*CONNECTORS, BOTH], default=KVGRPC, help="both: one after the other")
    found.add_argument("--mode", choices=MODES, default=PULL)
    found.add_argument("--policy", choices=["fail", "recompute"], default="fail", help="vLLM's kv_load_failure_policy")
    found.add_argument("--blocks", type=int, default=40, help="of each engine's pool")
    found.add_argument("--hang-ups", type=float, default=0.5, help="share of the requests whose clients hang up")
    found.add_argument("--kills", type=int, help=f"of D; default: one for every {KILLED_EVERY} requests")
    found.add_argument("--limit-s", type=float, default=3600.0, help="no request is sent after that, by each connector")
    found.add_argument("--folder", type=Path, help="keep logs and a line for each request here")
    return found


def _wrong(options: argparse.Namespace) -> str:
    """Returns why the options make no storm, or ""."""
    if options.requests < 1:
        return "--requests is at least 1"
    if not 0 <= options.hang_ups <= 1:
        return "--hang-ups is from 0 to 1"
    if options.blocks < BLOCKS_MIN:
        return f"--blocks is at least {BLOCKS_MIN}: the longest request has to fit"
    if options.kills < 0 or (options.kills and options.requests < (options.kills + 1) * (MISSED + 1)):
        return f"--kills: {MISSED + 1} requests have to come before each and after the last"
    if options.mode == PUSH and options.connector != KVGRPC:
        return "--mode push is for --connector kvgrpc: NixlConnector's pushes need a router of their own"
    return ""
