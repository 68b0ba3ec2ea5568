"""Measures a fleet of many engines on a real etcd.

    make fleet ARGS="--json --engines 1000"

The publications, etcd, `kvgrpc fleet` and the router's client are real. The engines are simulated: they have no pools,
and one process answers health checks for many of them, each at a port of its own.

    make fleet ARGS="--json --parts storm"
    make fleet ARGS="--json --parts peers"

The storm has an etcd of its own, eight real leads with pools, and two routers that pick pairs, hand over, pull and
compare every byte, while leads are killed (SIGKILL) and added at random. The peers are real leads as well, many in a
process: one more lead, in a process of its own, meets all of them and pulls from one.
"""

import argparse
import asyncio
import json
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.fleet.peers.run import many_peers
from bench.fleet.run import run, say
from bench.fleet.storm.run import storm
from bench.machine import machine, versions
from kvgrpc.core.values.limits import Limits

PARTS = FLEET, STORM, PEERS = ("fleet", "storm", "peers")


async def _part(part: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    if part == STORM:
        return await storm(folder, options.storm_s, options.seed, options.ttl_s)
    return await many_peers(folder, options.peers, options.rest_s)


def main() -> None:
    """Measures, and prints."""
    parser = argparse.ArgumentParser(
        prog="make fleet", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--engines", type=int, default=1000, help="number of engines, from 4 (1000)")
    parser.add_argument("--ttl-s", type=int, default=15, help="time after which the entry of a dead lead goes, s (15)")
    parser.add_argument("--publishers", type=int, default=2, help="number of processes that publish and stay (2)")
    parser.add_argument(
        "--rest-s", type=float, default=10.0, help="how long a fleet or lead at rest is measured, s (10)"
    )
    parser.add_argument("--restart-s", type=float, default=30.0, help="how long the rolling restart takes, s (30)")
    parser.add_argument("--picks", type=int, default=1000, help="number of picks (1000)")
    parser.add_argument("--storm-s", type=float, default=60.0, help="how long requests come, s (60)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the storm's prompts, kills and additions (1)")
    parser.add_argument("--peers", type=int, default=500, help="number of peers that one lead meets, from 2 (500)")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"parts of the run ({','.join(PARTS)})")
    options = parser.parse_args()
    if options.engines < 4:
        parser.error("--engines is at least 4")
    if not 2 <= options.peers <= Limits().peers:
        parser.error(f"--peers is from 2 to {Limits().peers}")
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: there is no part {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # through the ends of all processes
    found = {"machine": machine(), "versions": versions(), "options": vars(options)}
    if FLEET in parts:
        found |= asyncio.run(run(options))
    for part, what in ((STORM, "requests over real leads, of which some die"), (PEERS, "a lead meets many peers")):
        if part in parts:
            say(what)
            with TemporaryDirectory(prefix="kvgrpc-fleet-") as folder:
                found[part] = asyncio.run(_part(part, Path(folder), options))
    say("done")
    print(json.dumps(found, indent=None if options.json else 2), flush=True)


if __name__ == "__main__":
    main()
