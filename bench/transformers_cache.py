"""The time left to wait for a moved cache when a prefill ends: moved by layers during it, or whole after it.

    make bench-transformers                       # a table
    make bench-transformers ARGS=--json           # one JSON object on stdout

There are two processes, as in examples/transformers: a Hugging Face Llama with random weights prefills in one, and the
other gets its cache as named tensors. Each has a thread for its model, and each repeat has one prefill of either kind,
in turn. The visible time is that from the end of the prefill, the first token, until the other process has the whole
cache.
"""

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.machine import machine
from examples.transformers.moving import Sender, digest_of, prefill, receive
from kvgrpc.engine.tensors import TensorStore

VISIBLE_RATIO_MAX = 0.35
VOCAB = 512
LAYERS = 16
HEADS = 8
HEAD_DIM = 128
STORE_BYTES = 512 << 20
WARM = 1
WHOLE, LAYERWISE = "whole", "layer-wise"


class Later:
    """Collects what a prefill computes, and puts it when the prefill is over."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._computed: list[tuple[int, int, int, Any]] = []
        self.part = self.new_tokens = 0

    def layer_done(self, layer: int, cache: Any) -> None:
        """Collects a layer of the current part."""
        self._computed.append((self.part, self.new_tokens, layer, cache))

    def put(self) -> None:
        """Puts everything."""
        for part, new_tokens, layer, cache in self._computed:
            self._sender.part, self._sender.new_tokens = part, new_tokens
            self._sender.layer_done(layer, cache)


def make_model() -> Any:
    """Returns the same model in both processes. The consumer only needs its shape."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HEADS * HEAD_DIM, intermediate_size=2 * HEADS * HEAD_DIM,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=8192,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def prefill_process(pipe: Connection, data_path: str, prompt: list[int]) -> None:
    """Runs the prefill side: receives key, address and kind, and sends when its prefill began and ended."""
    with TensorStore.launch(store_bytes=STORE_BYTES, flags=["--data-paths", data_path]) as store:
        model = make_model()
        pipe.send(store.address)
        while (order := pipe.recv()) is not None:
            key, address, kind = order
            sender = Sender(store, key, digest_of(prompt), address)
            later = Later(sender)
            began = time.monotonic()
            prefill(model, prompt, len(prompt), sender if kind == LAYERWISE else later)  # type: ignore[arg-type]
            ended = time.monotonic()
            later.put()
            store.wait_for_saved()
            pipe.send((began, ended))


def decode_process(pipe: Connection, data_path: str, prompt: list[int]) -> None:
    """Runs the decode side: receives keys, and sends when it had the cache, and the bytes of the cache."""
    with TensorStore.launch(store_bytes=STORE_BYTES, flags=["--data-paths", data_path]) as store:
        model = make_model()
        pipe.send(store.address)
        while (key := pipe.recv()) is not None:
            cache = receive(model, store, key, prompt, len(prompt))
            done = time.monotonic()
            pipe.send((done, sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)))


def measure(data_path: str, repeats: int, prompt: list[int]) -> dict[str, Any]:
    """Measures one case."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for work in (prefill_process, decode_process):
        here, there = spawn.Pipe()
        processes.append(spawn.Process(target=work, args=(there, data_path, prompt)))
        processes[-1].start()
        there.close()  # only the process holds it: when that dies, `recv` raises
        pipes.append(here)
    p, d = pipes
    p.recv()
    address = d.recv()
    prefill_s, nbytes = 0.0, 0
    visible: dict[str, list[float]] = {WHOLE: [], LAYERWISE: []}
    for number in range(WARM + repeats):
        for kind in (WHOLE, LAYERWISE) if number % 2 else (LAYERWISE, WHOLE):
            key = os.urandom(16)
            d.send(key)
            p.send((key, address, kind))
            began, ended = p.recv()
            done, nbytes = d.recv()
            visible[kind].append(max(done - ended, 0.0))  # the last layer may be there before the token
            prefill_s = ended - began if kind == WHOLE else prefill_s
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
    whole, layerwise = (visible[kind][WARM:] for kind in (WHOLE, LAYERWISE))
    return {
        "name": f"transformers layer-wise over {data_path}",
        "datapath": data_path,
        "layers": LAYERS,
        "tokens": len(prompt),
        "nbytes": nbytes,
        "prefill_ms": prefill_s * 1e3,
        "visible_whole_ms": statistics.median(whole) * 1e3,
        "visible_layerwise_ms": statistics.median(layerwise) * 1e3,
        "visible_ratio": statistics.median(b / a for a, b in zip(whole, layerwise, strict=True)),
    }


def main() -> int:
    """Measures, and prints. Returns 0 when all is measured."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data-paths", default="collective,shm")
    options.add_argument("--repeats", type=int, default=9)
    options.add_argument("--tokens", type=int, default=512)
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    prompt = [random.Random(7).randrange(VOCAB) for _ in range(chosen.tokens)]  # noqa: S311 - a prompt is no secret
    place = machine()
    cases = [measure(path, chosen.repeats, prompt) for path in chosen.data_paths.split(",")]
    if chosen.json:
        print(json.dumps({"repeats": chosen.repeats, "machine": place, "cases": cases}, indent=2))
        return 0
    for case in cases:
        print(
            f"{case['name']}: {case['nbytes'] >> 20} MB of {case['tokens']} tokens in {case['layers']} layers, prefill "
            f"{case['prefill_ms']:.0f} ms; visible {case['visible_whole_ms']:.0f} ms whole, "
            f"{case['visible_layerwise_ms']:.0f} ms layer-wise, ratio {case['visible_ratio']:.2f} "
            f"(wanted {VISIBLE_RATIO_MAX} or less)"
        )
    print(f"{chosen.repeats} repeats; load {place['load_1min']} before the run; {place['processor']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
