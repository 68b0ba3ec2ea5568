"""What a child process is: the commands that it performs."""

from collections.abc import Awaitable
from typing import Any, Protocol

Answer = tuple[dict[str, Any], list[int]]
"""What a command gives: values for JSON, and descriptors that go with them."""


class Role(Protocol):
    """What this process is."""

    def perform(self, command: str, arguments: dict[str, Any], fds: list[int]) -> Awaitable[Answer]:
        """Performs one command; the descriptors are its to close."""
        ...

    async def close(self) -> None: ...
