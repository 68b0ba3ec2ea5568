"""Protocol of a child process: the commands that it performs."""

from collections.abc import Awaitable
from typing import Any, Protocol

Answer = tuple[dict[str, Any], list[int]]
"""Result of a command: values for JSON, and file descriptors that go with them."""


class Role(Protocol):
    """The role of this process."""

    def perform(self, command: str, arguments: dict[str, Any], fds: list[int]) -> Awaitable[Answer]:
        """Performs one command, which takes ownership of the file descriptors."""
        ...

    async def close(self) -> None: ...
