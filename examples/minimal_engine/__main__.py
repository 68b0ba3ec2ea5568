"""The demo's engine as a process: JSON lines on standard input and output.

    {"op": "prefill", "prompt", ...}           ->  {"prefilled_s", "kv_transfer_params"}    for a pull
    {"op": "prefill", "prompt", "push_to", "layerwise", ...}     ->  {"prefilled_s"}        a push
    {"op": "reserve", "prompt", ...}           ->  {"kv_transfer_params"}                   for a push
    {"op": "decode", "prompt", "count", "kv_transfer_params", ...}  ->  {"tokens", "transfer_id", "received_s"}
    {"op": "decode", "count", ...}             ->  the same, of what was reserved under the key
    {"op": "generate", "prompt", "count"}      ->  {"tokens"}
    {"op": "forget"}                           ->  {}                 empties the prefix cache
    {"op": "usage"}                            ->  {"used_blocks"}

All but the last three have a "transfer_key", "request_id" and "traceparent". With "offer" (key and TTL), decode hands
prompt and reply over, and answers with that "offer" and its "lease_id". With such an "offer", prefill takes the history
from there, and reports the result as "history".

A line that fails is answered with {"error"}. The end of the input ends the process, and with it the session.
"""

import argparse
import json
import select
import sys
from typing import Any

from torch import Tensor

from examples.minimal_engine import chat, push
from examples.minimal_engine.engine import MinimalEngine, Request, TransferFailed
from kvgrpc.core.values.grants import from_json
from kvgrpc.engine import Reservation
from kvgrpc.errors import KVGrpcError

Line = dict[str, Any]


class Operations:
    """The operations, one method each."""

    def __init__(self, engine: MinimalEngine) -> None:
        self.engine = engine
        self._reserved: dict[str, tuple[Request, Reservation]] = {}
        """Requests and reservations by transfer key, until they are decoded."""

    def prefill(self, line: Line) -> Line:
        grant = from_json(line["push_to"]) if "push_to" in line else None
        request = self.engine.begin(line["prompt"])
        told: Line = {}
        if "offer" in line:
            told["history"] = self._take_history(request, line)
        if grant is not None:
            push.prefill(self.engine, request, grant, layerwise=line["layerwise"], **_labels(line))
        else:
            handover = self.engine.prefill(request, ttl_s=line.get("ttl_s"), **_labels(line))
            told["kv_transfer_params"] = handover.kv_transfer_params
        return told | {"prefilled_s": self.engine.prefilled_s}

    def reserve(self, line: Line) -> Line:
        request = self.engine.begin(line["prompt"])
        try:
            reservation = push.reserve(self.engine, request, **_labels(line))
        except TransferFailed:
            self.engine.release(request)
            raise
        self._reserved[line["transfer_key"]] = request, reservation
        return {"kv_transfer_params": reservation.kv_transfer_params}

    def decode(self, line: Line) -> Line:
        if "kv_transfer_params" in line:
            request, reservation = self.engine.begin(line["prompt"]), None
        else:
            request, reservation = self._reserved.pop(line["transfer_key"])
        try:
            transfer_id, logits = self._receive(request, reservation, line)
        except (TransferFailed, KVGrpcError):
            self.engine.release(request)
            raise
        told: Line = {"received_s": self.engine.received_s, "transfer_id": transfer_id}
        if line.get("corrupt"):
            # The last block was received in any case: a comparison must notice.
            self.engine.kv[0][request.table[-1]].mul_(-1.0)
            logits = None
        told["tokens"] = self.engine.decode(request, line["count"], logits)
        if "offer" in line:
            return told | self._offer(request, line["offer"], line["request_id"])
        self.engine.release(request)
        return told

    def generate(self, line: Line) -> Line:
        request = self.engine.begin(line["prompt"])
        tokens = self.engine.decode(request, line["count"])
        self.engine.release(request)
        return {"tokens": tokens}

    def forget(self, _: Line) -> Line:
        self.engine.blocks.forget()
        return {}

    def usage(self, _: Line) -> Line:
        self.engine.step()
        return {"used_blocks": self.engine.blocks.used_blocks}

    def _receive(self, request: Request, reservation: Reservation | None, line: Line) -> tuple[str, Tensor | None]:
        """Returns the transfer's id, and the logits of the prompt's end if they are already known."""
        if reservation is not None:
            return reservation.transfer_id, push.receive(self.engine, request, reservation)
        pull = self.engine.receive(request, from_json(line["kv_transfer_params"]), **_labels(line))
        return pull.transfer_id, None

    def _take_history(self, request: Request, line: Line) -> Line:
        held_tokens, offer = request.have_tokens, line["offer"]
        labels = _labels(line | {"transfer_key": offer["transfer_key"]})
        pulled_tokens = chat.take_history(self.engine, request, from_json(offer["kv_transfer_params"]), **labels)
        return {
            "held_tokens": held_tokens,
            "pulled_tokens": pulled_tokens,
            "recompute_tokens": chat.RECOMPUTE_TOKENS,
        }

    def _offer(self, request: Request, offer: Line, request_id: str) -> Line:
        labels = _labels({"request_id": request_id, "transfer_key": offer["transfer_key"]})
        handover = chat.offer(self.engine, request, ttl_s=offer["ttl_s"], **labels)
        return {
            "offer": {"kv_transfer_params": handover.kv_transfer_params, "transfer_key": offer["transfer_key"]},
            "lease_id": handover.lease_id,
        }


def _labels(line: Line) -> Line:
    """Returns the router's names of a transfer."""
    labels = {name: line[name] for name in ("request_id", "traceparent") if name in line}
    return labels | {"transfer_key": bytes.fromhex(line["transfer_key"])}


def main() -> None:
    """Serves lines until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--session-socket", default="", help="where its lead listens; none: no transfers")
    parser.add_argument("--ranks", type=int, default=1, help="over so many its KV heads are split")
    parser.add_argument("--window-tokens", type=int, default=0, help="every second layer sees no more; 0: all see all")
    arguments = parser.parse_args()
    engine = MinimalEngine(arguments.session_socket, ranks=arguments.ranks, window_tokens=arguments.window_tokens)
    operations = Operations(engine)
    print(json.dumps({"ready": True}), flush=True)
    while True:
        waits = [sys.stdin, engine.engine] if hasattr(engine, "engine") else [sys.stdin]
        ready, _, _ = select.select(waits, [], [])
        if sys.stdin not in ready:
            engine.step()
            continue
        text = sys.stdin.readline()
        if not text:
            return
        line = json.loads(text)
        try:
            reply = getattr(operations, line["op"])(line)
        except (TransferFailed, KVGrpcError) as error:
            reply = {"error": str(error)}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
