"""Measures a fleet of many engines on a real etcd.

    make fleet ARGS="--json --engines 1000"

The publications, etcd, `kvgrpc fleet` and the router's client are real. The engines are simulated: they have no pools,
and one process answers health checks for many of them, each at a port of its own.

    make fleet ARGS="--json --storm-alone"

The storm comes last, with an etcd of its own: eight real leads with pools, and two routers that pick pairs, hand over,
pull and compare every byte, while leads are killed (SIGKILL) and added at random.
"""

import argparse
import asyncio
import json
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.fleet.run import run, say
from bench.fleet.storm.run import storm
from bench.machine import machine, versions


def main() -> None:
    """Measures, and prints."""
    parser = argparse.ArgumentParser(
        prog="make fleet", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--engines", type=int, default=1000, help="number of engines, from 4 (1000)")
    parser.add_argument("--ttl-s", type=int, default=15, help="time after which the entry of a dead lead goes, s (15)")
    parser.add_argument("--publishers", type=int, default=2, help="number of processes that publish and stay (2)")
    parser.add_argument("--rest-s", type=float, default=10.0, help="how long the resting fleet is measured, s (10)")
    parser.add_argument("--restart-s", type=float, default=30.0, help="how long the rolling restart takes, s (30)")
    parser.add_argument("--picks", type=int, default=1000, help="number of picks (1000)")
    parser.add_argument("--storm-s", type=float, default=60.0, help="how long real leads are in a storm; 0: never (60)")
    parser.add_argument("--storm-alone", action="store_true", help="only the storm")
    parser.add_argument("--seed", type=int, default=1, help="seed of the storm's prompts, kills and additions (1)")
    options = parser.parse_args()
    if options.engines < 4:
        parser.error("--engines is at least 4")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # through the ends of all processes
    described = {"machine": machine(), "versions": versions(), "options": vars(options)}
    found = described | ({} if options.storm_alone else asyncio.run(run(options)))
    if options.storm_s:
        say("requests over real leads, of which some die")
        with TemporaryDirectory(prefix="kvgrpc-storm-") as folder:
            found["storm"] = asyncio.run(storm(Path(folder), options.storm_s, options.seed, options.ttl_s))
    say("done")
    print(json.dumps(found, indent=None if options.json else 2), flush=True)


if __name__ == "__main__":
    main()
