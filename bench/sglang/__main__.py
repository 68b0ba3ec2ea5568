"""SGLang's prefill and decode with the back end kvgrpc, beside SGLang's own back end that runs on a processor.

    make sglang-bench                                   # all parts
    make sglang-bench ARGS="--json --parts pairs"       # one JSON object on stdout; progress goes to stderr
    make sglang-bench ARGS="--parts storm --requests 600 --seed 2"

pairs: two pairs of servers, and an engine that does both, get the same prompts in turn. The time to the first token is
from sending both legs to decode's answer of one token. The hand-over is that time without the time of the engine that
does both. SGLang's own back end is mooncake over TCP; a hook makes it leave out page-locked memory, for which it asks
a GPU. `ratio_own_backend` is the median with kvgrpc by the median with the other one.

storm: bursts through sglang-router whose clients hang up, and a kill of each engine. Every whole answer is compared
with that of one engine.

cross: vLLM prefills for SGLang, and SGLang for vLLM.
"""

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.machine import machine, versions
from bench.sglang import cross, pairs, storm
from tests.sglang.servers import write_model

PARTS = "pairs", "storm", "cross"


def main() -> None:
    """Measures, and prints."""
    options = _parsed(sys.argv[1:])
    # A run that is ended from outside still ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found: dict[str, Any] = {
        "machine": machine(),
        "versions": versions("sglang", "sglang-router", "mooncake-transfer-engine-non-cuda", "transformers"),
    }
    with tempfile.TemporaryDirectory(prefix="kvgrpc-sglang-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_model(folder / "model")
        if "pairs" in options.parts:
            found |= pairs.measured(folder, options.repeats, _tell)
        if "storm" in options.parts:
            found["storm"] = storm.measured(folder, options.requests, options.seed, _tell)
        if "cross" in options.parts:
            found["cross"] = cross.measured(folder, _tell)
    if options.json:
        print(json.dumps(found), flush=True)
    else:
        _show(found)


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make sglang-bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--repeats", type=int, default=15, help="of each length of prompt")
    parser.add_argument("--requests", type=int, default=300, help="of the storm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep the logs of servers here")
    options = parser.parse_args(arguments)
    if options.repeats < 1 or options.requests < 3:
        parser.error("--repeats is at least 1, and --requests at least 3")
    return options


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _show(found: dict[str, Any]) -> None:
    for case in found.get("cases", ()):
        times = ", ".join(f"{name} {value} ms" for name, value in case["median_ms"].items())
        print(f"{case['name']}: {case['ratio_own_backend']} of SGLang's own ({times}; {case['repeats']} repeats)")
    for name in ("hooks_us_per_step", "storm", "cross"):
        if name in found:
            print(f"{name}: {json.dumps(found[name])}")


if __name__ == "__main__":
    main()
