"""The options of `make router-test`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.routers.kinds import MODES, NAMES

TOOLS = Path(".tools/routers")


def parsed(description: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options. Exits if they make no run."""
    parser = argparse.ArgumentParser(
        prog="make router-test", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--routers", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE", help="of both engines"
    )
    parser.add_argument("--llm-d", default="", metavar="COMMAND", help="starts llm-d's routing sidecar")
    parser.add_argument("--production-stack", default="", metavar="COMMAND", help="starts its router")
    parser.add_argument("--tools", type=Path, default=TOOLS, help="where vLLM's own proxies are")
    parser.add_argument("--folder", type=Path, help="keep logs here")
    parser.add_argument("--results", type=Path, nargs="+", default=[], help="nothing runs: these results as JSON")
    parser.add_argument("--docs", type=Path, help="put the matrix into this page")
    return parser.parse_args(arguments)
