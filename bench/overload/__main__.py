"""Offers a lead ten times the calls that it serves, and measures what another caller and health get meanwhile."""

import argparse
import asyncio
import json

from bench.machine import machine, versions
from bench.overload.run import run, say

MODES = ("connections", "identities")


def main() -> None:
    """Measures, and prints."""
    parser = argparse.ArgumentParser(
        prog="make overload", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--mode", choices=(*MODES, "both"), default="both", help="what tells the callers apart")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each flood lasts (60)")
    parser.add_argument("--control-s", type=float, help="how long another lead is flooded (as each flood)")
    parser.add_argument("--quiet-s", type=float, help="how long the quiet lasts (as each flood)")
    parser.add_argument("--rate-s", type=float, default=5.0, help="how long the rate of a lead is measured (5)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds in each mode (3)")
    parser.add_argument("--times", type=float, default=10.0, help="offered calls for each that is served (10)")
    parser.add_argument("--connections", type=int, default=8, help="connections of the greedy caller (8)")
    parser.add_argument("--timeout-s", type=int, default=20, help="deadline of each of its calls, s (20)")
    parser.add_argument("--flag", action="append", default=[], help="one more argument of `kvgrpc serve`")
    options = parser.parse_args()
    modes = MODES if options.mode == "both" else (options.mode,)
    found = {"machine": machine(), "versions": versions(), "options": vars(options)}
    for mode in modes:
        found[mode] = asyncio.run(run(options, mode))
    say("done")
    print(json.dumps(found, indent=None if options.json else 2), flush=True)


if __name__ == "__main__":
    main()
