"""Runs prefill and decode as two processes, each with transformers' continuous batching, and compares with one of them.

python -m examples.transformers.blocks
"""

import multiprocessing
import os
import random
import sys
from multiprocessing.connection import Connection

from examples.transformers.model import VOCAB, make_model
from examples.transformers.paged import PagedEngine

DRAWN = random.Random(7)  # noqa: S311 - prompts are no secrets
PROMPTS = [[DRAWN.randrange(VOCAB) for _ in range(tokens)] for tokens in (300, 64, 21)]
TOKENS = 24
BLOCKS = 96


def prefill_process(pipe: Connection) -> None:
    """Prefills every prompt, hands it over, and steps until all blocks are back."""
    engine = PagedEngine(make_model(), BLOCKS, "example")
    for number, prompt in enumerate(PROMPTS):
        engine.prefill(str(number), prompt)
    while len(engine.answers) < len(PROMPTS):
        engine.step()
    pipe.send([engine.hand_over(prompt, os.urandom(16)).kv_transfer_params for prompt in PROMPTS])
    while engine.given:
        engine.step(0.1)
    pipe.send("all blocks are back")
    pipe.recv()
    engine.close()


def decode_process(pipe: Connection) -> None:
    """Decodes what was handed over, and sends the tokens of each prompt, with how many of its tokens came."""
    engine = PagedEngine(make_model(), BLOCKS, "example")
    pipe.send("ready")
    taken = [
        engine.take(str(number), prompt, TOKENS, params)
        for number, (prompt, params) in enumerate(zip(PROMPTS, pipe.recv(), strict=True))
    ]
    while len(engine.answers) < len(PROMPTS):
        engine.step(0.001)
    came = [0 if request.pull.failed else request.pull.use_tokens for request in taken]
    pipe.send(([engine.answers[request.id] for request in taken], came))
    pipe.recv()
    engine.close()


def alone() -> list[list[int]]:
    """Returns the tokens of one engine that prefills and decodes."""
    engine = PagedEngine(make_model(), BLOCKS, "example")
    for number, prompt in enumerate(PROMPTS):
        engine.add(str(number), prompt, TOKENS)
    while len(engine.answers) < len(PROMPTS):
        engine.step()
    engine.close()
    return [engine.answers[str(number)] for number in range(len(PROMPTS))]


def main() -> int:
    """Runs both ways, and compares. Returns 0 if the tokens are the same and all whole blocks came."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for work in (prefill_process, decode_process):
        here, there = spawn.Pipe()
        processes.append(spawn.Process(target=work, args=(there,), daemon=False))
        processes[-1].start()
        pipes.append(here)
    p, d = pipes
    d.recv()
    d.send(p.recv())
    two, came = d.recv()
    print(p.recv())
    for pipe in pipes:
        pipe.send("end")
    for process in processes:
        process.join()
    one = alone()
    for number, prompt in enumerate(PROMPTS):
        same = "the same" if one[number] == two[number] else "NOT THE SAME"
        print(f"prompt of {len(prompt)} tokens, {came[number]} of them moved: {two[number]}: {same}")
    return 0 if one == two and all(came) and not any(process.exitcode for process in processes) else 1


if __name__ == "__main__":
    sys.exit(main())
