"""The common base of a staging store's parts, in one life of the engine."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from kvgrpc.core.tensors.table import TensorTable
from kvgrpc.errors import Aborted, KVGrpcError, Reason, Unavailable
from kvgrpc.service.lead import Lead
from kvgrpc.service.tensors.store_transfers import StoreTransfers

_log = logging.getLogger(__name__)
Work = Coroutine[Any, Any, Any]


class Life:
    """The table, the calls to the node, and the tasks, which end with the life. `perform` does what the table wants
    done: call it after every change of the table.
    """

    def __init__(self, lead: Lead, table: TensorTable, perform: Callable[[], None]) -> None:
        self.lead = lead
        self.table = table
        self.perform = perform
        self.transfers = StoreTransfers(lead)
        self.time = lead.runner.time
        """Returns the seconds on the node's clock."""
        self.over = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Work) -> "asyncio.Task[Any]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def end(self) -> "set[asyncio.Task[Any]]":
        """Cancels the life's tasks and returns them."""
        self.over = True
        for task in self._tasks:
            task.cancel()
        return set(self._tasks)

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a tensor could not be moved", exc_info=task.exception())


def gone(lead: Lead) -> KVGrpcError:
    """Returns the error for calls of a life that is over."""
    if lead.runner.node.state.life.stopping:
        return Unavailable(Reason.ENGINE_LOST, "the server is stopping")
    return Aborted(Reason.INCARNATION_CHANGED, "the life of the engine whose tensors these were is over")
