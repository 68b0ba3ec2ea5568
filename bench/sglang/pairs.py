"""Times of two pairs that differ in their back end, and of an engine that does both, with the same prompts in turn."""

import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.sglang.engines import KVGRPC, OWN, first_token_alone_s, first_token_s, hook_us, server, started
from tests.sglang.servers import Pair, Server, prompt_of

LENGTHS = (64, 512, 2048)
WARM_UPS = 2
ALONE = "alone"
Rows = dict[str, list[float]]


def measured(folder: Path, repeats: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Returns the cases, with the hooks' time at both engines."""
    times = {side: folder / f"times-{side}" for side in ("prefill", "decode")}
    one = server("one", folder, "")
    pairs = {
        backend: Pair(
            server(f"P-{backend}", folder, "prefill", backend, times["prefill"] if backend == KVGRPC else None),
            server(f"D-{backend}", folder, "decode", backend, times["decode"] if backend == KVGRPC else None),
            one,
        )
        for backend in (KVGRPC, OWN)
    }
    with started([one, *(side for pair in pairs.values() for side in (pair.p, pair.d))]):
        tell("engines are up")
        cases = [found for length in LENGTHS for found in _cases(pairs, one, length, repeats, tell)]
        return {"cases": cases, "hooks_us_per_step": {side: round(hook_us(path), 1) for side, path in times.items()}}


def _cases(
    pairs: dict[str, Pair], one: Server, length: int, repeats: int, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Returns the two cases of prompts of a length. Each repeat has a prompt of its own, and another order."""
    rows: Rows = {name: [] for name in (*pairs, ALONE)}
    for number in range(-WARM_UPS, repeats):
        prompt = prompt_of(length, seed=length * 1000 + number)
        order, tokens, took = list(rows), {}, {}
        random.Random(number).shuffle(order)  # noqa: S311 - an order is no secret
        for name in order:
            if name == ALONE:
                took[name], tokens[name] = first_token_alone_s(one, prompt)
            else:
                took[name], tokens[name] = first_token_s(pairs[name], prompt, random.getrandbits(62) + 1)
        if any(found != tokens[ALONE] for found in tokens.values()):
            raise RuntimeError(f"tokens differ: {tokens}")
        if number >= 0:
            for name, seconds in took.items():
                rows[name].append(seconds)
    tell(
        f"{length} tokens: " + ", ".join(f"{name} {1e3 * statistics.median(row):.1f} ms" for name, row in rows.items())
    )
    after = {name: [own - alone for own, alone in zip(rows[name], rows[ALONE], strict=True)] for name in pairs}
    return [_case(f"first token, {length} tokens", rows), _case(f"hand-over, {length} tokens", after)]


def _case(name: str, rows: Rows) -> dict[str, Any]:
    medians = {of: statistics.median(row) for of, row in rows.items()}
    return {
        "name": name, "repeats": len(rows[KVGRPC]), "ratio_own_backend": round(medians[KVGRPC] / medians[OWN], 3),
        "median_ms": {of: round(1e3 * median, 2) for of, median in medians.items()},
        "min_ms": {of: round(1e3 * min(row), 2) for of, row in rows.items()},
    }  # fmt: skip
