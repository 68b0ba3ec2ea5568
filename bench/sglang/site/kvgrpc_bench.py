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

TIMES = "BENCH_KVGRPC_TIMES"
"""Environment variable: a file that is there, for the seconds in kvgrpc's calls, and the steps that had such calls."""
IDLE = "wait"
"""Call that waits while there is nothing to compute: no part of a step."""


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

    def untimed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def waited(*arguments: Any) -> Any:
            self._within = True
            try:
                return call(*arguments)
            finally:
                self._within = False

        return waited

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
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    path = os.environ.get(TIMES, "")
    if path and Path(path).exists():
        timer = Timer(path)
        HookRegistry.register(f"{scheduler}.ingest_requests", timer.stepped, HookType.BEFORE)
        HookRegistry.register(f"{scheduler}.init_disaggregation", functools.partial(_time, timer), HookType.BEFORE)
    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", _on_a_processor, HookType.AFTER)


def _time(timer: Timer, *_: Any, **__: Any) -> None:
    """Times the calls of kvgrpc's classes."""
    from kvgrpc.integrations.sglang.manager import KVManager
    from kvgrpc.integrations.sglang.receiver import KVReceiver
    from kvgrpc.integrations.sglang.sender import KVSender

    for of in (KVManager, KVReceiver, KVSender):
        for name, call in list(vars(of).items()):
            if callable(call) and not name.startswith("_"):
                setattr(of, name, timer.untimed(call) if name == IDLE else timer.timed(call))


def _on_a_processor(found: Any, *_: Any, **__: Any) -> None:
    """Keeps a sender of SGLang's own from page-locked memory, for which it asks a GPU."""
    if getattr(found, "supports_host_tensor_indices", False):
        found.supports_host_tensor_indices = False
