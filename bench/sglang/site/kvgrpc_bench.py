"""A plugin in SGLang's processes while they are measured: it times the calls of a back end of kvgrpc, and lets
SGLang's own back end run on a processor.

SGLang finds it by the metadata beside it.
"""

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

TIMES = "KVGRPC_BENCH_TIMES"
"""Environment variable: a file that is there, for the seconds in kvgrpc's calls, and the steps that had such calls."""
UNTIMED = frozenset(("__init__", "failure_exception"))


class Timer:
    """Sums up the time in calls, without those within others, and counts the steps of SGLang that had some."""

    def __init__(self, path: str) -> None:
        self._sums = np.memmap(path, dtype=np.float64, mode="r+", shape=(2,))
        self._within = False
        self._called = False

    def stepped(self, *_: Any, **__: Any) -> None:
        """Counts the step that ended."""
        if self._called:
            self._called = False
            self._sums[1] += 1

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def measured(*arguments: Any, **named: Any) -> Any:
            if self._within:
                return call(*arguments, **named)
            self._within = self._called = True
            began = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self._sums[0] += time.perf_counter() - began
                self._within = False

        return measured


def register() -> None:
    """Sets the hooks, in every process of SGLang."""
    timer = None
    if path := os.environ.get(TIMES, ""):
        timer = Timer(path) if Path(path).exists() else None
    if timer is not None:
        HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.ingest_requests", timer.stepped, HookType.BEFORE)
    HookRegistry.register(
        "sglang.srt.disaggregation.utils.get_kv_class", functools.partial(_given, timer, set()), HookType.AFTER
    )


def _given(timer: Timer | None, known: set[Any], found: Any, *_: Any, **__: Any) -> None:
    """Looks at a class that SGLang is given, once."""
    if found in known:
        return
    known.add(found)
    if getattr(found, "supports_host_tensor_indices", False):
        found.supports_host_tensor_indices = False  # True asks for page-locked memory, and that for a GPU
    if timer is None or not found.__module__.startswith("kvgrpc."):
        return
    for name, call in list(vars(found).items()):
        if callable(call) and not name.startswith("_") and name not in UNTIMED:
            setattr(found, name, timer.timed(call))
