"""The demo's engine as a process: JSON lines on standard input and output.

    {"op": "prefill", "prompt", "transfer_key", "request_id", "traceparent"}  ->  {"kv_transfer_params"}
    {"op": "decode", "prompt", "kv_transfer_params", "count", ...}             ->  {"tokens", "transfer_id"}
    {"op": "generate", "prompt", "count"}                                      ->  {"tokens"}

A line that fails is answered with {"error"}. The end of the input ends the process, and with it the session.
"""

import argparse
import json
import select
import sys
from typing import Any

from examples.minimal_engine.engine import MinimalEngine, PullFailed
from kvgrpc.core.grants import from_json
from kvgrpc.errors import KVGrpcError


def answer(engine: MinimalEngine, line: dict[str, Any]) -> dict[str, Any]:
    """Serves one request."""
    labels = {name: line[name] for name in ("request_id", "traceparent") if name in line}
    if line["op"] == "generate":
        return {"tokens": engine.generate(line["prompt"], line["count"])}
    key = bytes.fromhex(line["transfer_key"])
    if line["op"] == "prefill":
        handover = engine.prefill(line["prompt"], transfer_key=key, ttl_s=line.get("ttl_s"), **labels)
        return {"kv_transfer_params": handover.kv_transfer_params}
    grant = from_json(line["kv_transfer_params"])
    expected_key = {"transfer_key": key} if line.get("check_key", True) else {}
    pull, table = engine.receive(line["prompt"], grant, **expected_key, **labels)
    if line.get("corrupt"):
        engine.corrupt(table)
    tokens = engine.decode(line["prompt"], table, pull.use_tokens, line["count"])
    return {"tokens": tokens, "transfer_id": pull.transfer_id}


def main() -> None:
    """Serves lines until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--session-socket", default="", help="where its lead listens; none: no transfers")
    engine = MinimalEngine(parser.parse_args().session_socket)
    print(json.dumps({"ready": True}), flush=True)
    while True:
        waits = [sys.stdin, engine.engine] if hasattr(engine, "engine") else [sys.stdin]
        ready, _, _ = select.select(waits, [], [])
        if sys.stdin not in ready:
            engine.step()
            continue
        line = sys.stdin.readline()
        if not line:
            return
        try:
            reply = answer(engine, json.loads(line))
        except (PullFailed, KVGrpcError) as error:
            reply = {"error": str(error)}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
