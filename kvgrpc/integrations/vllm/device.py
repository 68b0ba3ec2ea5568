"""Reports of what a device computes: steps go on after their hooks, so a report waits until its results are there.

A hook that waited would stop the engine in every step. Instead the device marks the place in its queue, and a thread
waits for one mark after the other, in the order of the queue.
"""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch

from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.engine import Device
from kvgrpc.integrations.vllm.block_copies import BlockCopies
from kvgrpc.integrations.vllm.geometry import unserved

_log = logging.getLogger(__name__)


class Mark(Protocol):
    """A place in a device's queue of work."""

    def synchronize(self) -> None:
        """Waits until the device is past the mark. Raises the device's failure."""


MarkNow = Callable[[], Mark]
"""A function that marks what the caller's thread has queued so far."""


def marks_of(device: torch.device) -> MarkNow | None:
    """Returns the function that makes marks; None for a CPU, whose work is done when a call returns."""
    if device.type == "cpu":
        return None
    of = torch.get_device_module(device)
    # On CUDA devices a blocking wait takes no CPU time; events of other devices have no such option.
    how = {"blocking": True} if device.type == "cuda" else {}

    def mark() -> Mark:
        made: torch.cuda.Event = of.Event(**how)
        made.record(of.current_stream(device))
        return made

    return mark


def device_of(layout: PoolLayout, memory: torch.Tensor) -> Device:
    """Returns the Device of a cache's mirror: on CUDA devices with page-locked memory and streams of its own, on all
    others with the function by which vLLM's platform copies blocks. Raises ValueError for a cache that needs no mirror.
    """
    if memory.device.type == "cpu":
        raise unserved(
            "mirrors of caches on devices; this one is in memory of the host",
            "leave `mirror` out of kv_connector_extra_config: data paths reach this cache",
        )
    if not memory.is_cuda:
        return BlockCopies(layout, memory)
    from kvgrpc.engine.cuda import CudaDevice

    return CudaDevice([memory])


class AfterDevice:
    """Makes reports once a device is past what was queued before them."""

    def __init__(self, mark: MarkNow) -> None:
        self._mark = mark
        self._waiting: queue.SimpleQueue[tuple[Mark, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._say, name="kvgrpc-device", daemon=True)
        self._thread.start()

    def say(self, what: Callable[[], None]) -> None:
        """Calls `what` in another thread once the device is past what is queued; `what` must not raise."""
        self._waiting.put((self._mark(), what))

    def close(self) -> None:
        """Ends the thread after the reports that are queued. Does not wait: a device may hang."""
        self._waiting.put(None)

    def _say(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            mark, what = waiting
            try:
                mark.synchronize()
            except Exception:  # noqa: BLE001 - logged: what was computed is not there, and nothing after it
                _log.exception("kvgrpc: the device failed; nothing that it computes moves any more")
                return
            what()
