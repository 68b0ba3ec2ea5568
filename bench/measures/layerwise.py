"""Layer-wise pushes: the time left to wait after the end of a prefill, against a push of the whole.

The prefill is synthetic: it finishes one layer of all blocks after the other at a fixed pace, like a GPU, and uses no
processor.
"""

import statistics
import time
from dataclasses import dataclass
from functools import partial

from bench.measures.timed_pairs import quartiles, timed_pairs
from bench.plan import Case, LayerwisePlan, pool
from bench.results.pushes import LayerwiseCase
from bench.stages.engines import Engines
from bench.told import Told

_WARM = 3


@dataclass(frozen=True)
class Visible:
    """Figures of one push beside a prefill."""

    seconds: float
    early: int
    """Number of layers that the destination's engine had before the end of the prefill."""
    processor_s: tuple[float, float]
    """Processor time of the servers at source and destination since the beginning of the prefill, in seconds."""


def measure(plan: LayerwisePlan, told: Told) -> list[LayerwiseCase]:
    """Measures all cases of the plan."""
    found = []
    for block_bytes in plan.block_bytes:
        for data_path in plan.data_paths:
            blocks = plan.pool_bytes // (block_bytes * plan.layers)
            case = Case(data_path, block_bytes, blocks, plan.layouts[0], 0)
            told(f"{plan.layers} layers of {case.title}")
            layout = pool(block_bytes, blocks, plan.layers).layout()
            with Engines(data_path, layout, plan.copy_threads) as engines:
                found.append(_Prefills(plan, case, engines).measure())
    return found


class _Prefills:
    """The prefills of one case."""

    def __init__(self, plan: LayerwisePlan, case: Case, engines: Engines) -> None:
        self._plan = plan
        self._case = case
        self._engines = engines
        self._source, self._destination = case.ids("source"), case.ids("destination")

    def measure(self) -> LayerwiseCase:
        plan, case = self._plan, self._case
        self._engines.fill()
        whole_s = statistics.median([self._push_s() for _ in range(_WARM + 1)][1:])
        layer_s = whole_s / plan.layers * plan.prefill_ratio
        self._engines.fill()
        self._layerwise(layer_s)
        self._engines.check(self._source, self._destination)
        pairs = timed_pairs(plan.repeats, partial(self._whole, layer_s), partial(self._layerwise, layer_s))
        return LayerwiseCase(
            datapath=case.data_path,
            layers=plan.layers,
            block_bytes=case.block_bytes,
            blocks=case.blocks,
            layout=case.layout,
            layer_ms=layer_s * 1e3,
            prefill_ms=layer_s * plan.layers * 1e3,
            whole_ms=whole_s * 1e3,
            visible_whole_ms=statistics.median(whole.seconds for whole, _ in pairs) * 1e3,
            visible_layerwise_ms=statistics.median(parts.seconds for _, parts in pairs) * 1e3,
            visible_ratio=statistics.median(parts.seconds / whole.seconds for whole, parts in pairs),
            part_ms_source=statistics.median(parts.processor_s[0] for _, parts in pairs) / plan.layers * 1e3,
            part_ms_destination=statistics.median(parts.processor_s[1] for _, parts in pairs) / plan.layers * 1e3,
            layers_early=statistics.median(parts.early for _, parts in pairs),
            quartiles={
                "visible_whole_ms": quartiles([whole.seconds * 1e3 for whole, _ in pairs]),
                "visible_layerwise_ms": quartiles([parts.seconds * 1e3 for _, parts in pairs]),
                "visible_ratio": quartiles([parts.seconds / whole.seconds for whole, parts in pairs]),
            },
        )

    def _push_s(self) -> float:
        """Returns the seconds of a push of everything, without a prefill."""
        return self._whole(0.0).seconds

    def _whole(self, layer_s: float) -> Visible:
        """Runs a prefill, and then pushes one part with everything."""
        push, before = self._engines.register(self._destination), self._engines.processor_s()
        self._engines.run_until(time.monotonic() + layer_s * self._plan.layers)
        ended = time.monotonic()
        self._engines.finish(push, self._source)
        return self._seen(ended, 0, before)

    def _layerwise(self, layer_s: float) -> Visible:
        """Runs a prefill during which every layer is handed over when it is finished."""
        engines, layers = self._engines, self._plan.layers
        push, before = engines.register(self._destination), engines.processor_s()
        began = time.monotonic()
        for layer in range(layers - 1):
            engines.run_until(began + layer_s * (layer + 1))
            engines.finish(push, self._source, (layer, 1), last=False)
        engines.run_until(began + layer_s * layers)
        ended, early = time.monotonic(), engines.layers_seen
        engines.finish(push, self._source, (layers - 1, 1))
        return self._seen(ended, early, before)

    def _seen(self, ended: float, early: int, before: tuple[float, float]) -> Visible:
        visible_s = self._engines.received() - ended
        after = self._engines.processor_s()
        return Visible(visible_s, early, (after[0] - before[0], after[1] - before[1]))
