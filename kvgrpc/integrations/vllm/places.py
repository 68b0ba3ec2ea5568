"""Places where the scheduler's side and one worker leave texts for each other at the start, each under a name.

They have no other way: at this time vLLM carries messages from workers to the scheduler alone.
"""

import time
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Protocol

from torch.distributed import DistStoreError, TCPStore  # type: ignore[attr-defined]

CONNECT_S = 30.0
"""Maximum time to reach a store, in seconds."""


class MeetingPlace(Protocol):
    """A place of one worker."""

    far: bool
    """True if the worker is on another node than the scheduler."""

    def say(self, name: str, what: str) -> None:
        """Leaves a text for the other side, which finds all of it, or nothing."""

    def has(self, name: str) -> bool:
        """Returns whether there is such a text."""

    def hear(self, name: str, within_s: float) -> str:
        """Waits for a text of the other side, and returns it. Raises TimeoutError."""

    def remove(self, name: str) -> None:
        """Removes a text."""


class FolderPlace:
    """A folder of a worker on the scheduler's host. No other user may enter it."""

    far = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def say(self, name: str, what: str) -> None:
        path = self._folder / name
        made = path.with_suffix(".new")
        made.write_text(what)
        made.rename(path)

    def has(self, name: str) -> bool:
        return (self._folder / name).exists()

    def hear(self, name: str, within_s: float) -> str:
        deadline = time.monotonic() + within_s
        while not self.has(name):
            if time.monotonic() > deadline:
                raise silent(within_s, str(self._folder / name))
            time.sleep(0.01)
        return (self._folder / name).read_text()

    def remove(self, name: str) -> None:
        (self._folder / name).unlink()


class StorePlace:
    """Keys in the store at which vLLM's workers on all nodes met. Its connection is one of its own."""

    far = True

    def __init__(self, address: str, worker: str) -> None:
        """`address` of the store: host:port. `worker` is a name that no other worker has."""
        self._address, self._worker = address, worker

    @cached_property
    def _store(self) -> TCPStore:
        host, _, port = self._address.rpartition(":")
        return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=CONNECT_S))

    def _key(self, name: str) -> str:
        return f"kvgrpc/{self._worker}/{name}"

    def say(self, name: str, what: str) -> None:
        self._store.set(self._key(name), what)

    def has(self, name: str) -> bool:
        return bool(self._store.check([self._key(name)]))

    def hear(self, name: str, within_s: float) -> str:
        try:
            self._store.wait([self._key(name)], timedelta(seconds=within_s))
        except DistStoreError as error:
            raise silent(within_s, f"{self._key(name)} at {self._address}") from error
        return bytes(self._store.get(self._key(name))).decode()

    def remove(self, name: str) -> None:
        self._store.delete_key(self._key(name))


def silent(within_s: float, where: str) -> TimeoutError:
    """Returns the error of a side that waited in vain."""
    return TimeoutError(f"kvgrpc: the other side did not come within {within_s:g} s ({where})")
