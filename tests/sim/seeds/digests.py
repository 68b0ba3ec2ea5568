"""Digests of the traces of worlds."""

from dataclasses import replace

from sim import drawn, run
from sim.world.trace import Trace


def digest(seed: int, steps: int = 500, **changes: object) -> int:
    trace = Trace()
    run(replace(drawn(seed, steps), **changes), trace)  # type: ignore[arg-type]
    return trace.digest
