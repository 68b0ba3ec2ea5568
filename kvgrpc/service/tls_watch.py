"""Looks at the TLS files from time to time, so that a renewed certificate comes into use without a restart."""

import asyncio
from collections.abc import Callable, Sequence

from kvgrpc.tls import Tls

LOOK_S = 5.0
"""Time between two looks at the files, in seconds. Kubernetes takes a minute to update a mounted secret."""


class TlsWatch:
    """The watch of one server, which does nothing without TLS. Each of `on_change` hears that another identity came
    into use.
    """

    def __init__(self, tls: Tls | None, on_change: Sequence[Callable[[], None]]) -> None:
        self._tls = tls
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to look."""
        if self._tls is not None:
            self._task = asyncio.create_task(self._run(self._tls))

    async def stop(self) -> None:
        """Ends the watch."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, tls: Tls) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            # In a thread: the files may lie on a slow or absent file system.
            if await asyncio.to_thread(tls.look):
                for heard in self._on_change:
                    heard()
