"""Looks at files from time to time, so that a renewed certificate or other roles come into use without a restart."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

LOOK_S = 5.0
"""Time between two looks at the files, in seconds. Kubernetes takes a minute to update a mounted secret."""


class Looks(Protocol):
    """Values that were read from files."""

    def look(self) -> bool:
        """Reads the files again. Returns whether their content is another one now."""


class FileWatch:
    """A watch of files, which does nothing where there are none. Each of `on_change` hears of other content."""

    def __init__(self, files: Looks | None, on_change: Sequence[Callable[[], None]]) -> None:
        self._files = files
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._files is not None:
            self._task = asyncio.create_task(self._run(self._files))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, files: Looks) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            # In a thread: the files may lie on a slow or absent file system.
            if await asyncio.to_thread(files.look):
                for heard in self._on_change:
                    heard()
