"""Runs prefill and decode as two processes, and both in one for comparison."""

import multiprocessing
import os
import sys

from examples.transformers.model import compute, decode, make_model, new_cache
from examples.transformers.roles import PROMPT, TOKENS, decode_process, prefill_process


def main() -> int:
    """Runs both ways, and compares. Returns 0 if the tokens are the same."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for work in (prefill_process, decode_process):
        here, there = spawn.Pipe()
        processes.append(spawn.Process(target=work, args=(there,), daemon=False))
        processes[-1].start()
        pipes.append(here)
    p, d = pipes
    p.recv()
    decode_address, key = d.recv(), os.urandom(16)
    d.send(key)  # D waits for tensors that nobody has computed yet
    p.send((key, decode_address))
    d.send(p.recv())
    two = d.recv()
    p.send(None)
    for process in processes:
        process.join()
    model = make_model()
    cache = new_cache(model)
    one = decode(model, cache, compute(model, cache, PROMPT), TOKENS)
    print(f"two processes: {two}\none process:   {one}\n{'the same' if one == two else 'NOT THE SAME'}")
    return 0 if one == two and all(process.exitcode == 0 for process in processes) else 1


if __name__ == "__main__":
    sys.exit(main())
