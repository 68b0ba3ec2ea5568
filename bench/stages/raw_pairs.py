"""The baselines of every transfer between two processes: pairs of processes on the memory of the servers' pools."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

from bench.plan import Case
from bench.stages.hosts import Host

READ = "READ"
WRITE = "WRITE"
PROGRESS_THREAD = "progress_thread"
TARGET_POLLED = "target_polled"
MODES = (TARGET_POLLED, PROGRESS_THREAD)


class _Pair:
    """Two baseline processes, stopped except during their turns."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._source, self._destination = Host("baseline", environment), Host("baseline", environment)

    def close(self) -> None:
        """Ends the processes."""
        self._source.close()
        self._destination.close()

    @contextmanager
    def _running(self) -> Iterator[None]:
        with self._source.running(), self._destination.running():
            yield


class RawPair(_Pair):
    """Raw NIXL: an agent in each process. They are stopped except during their turns, because one mode burns cores."""

    def __init__(self, mode: str, environment: Mapping[str, str]) -> None:
        super().__init__(environment)
        self._mode = mode
        self._source_pool: dict[str, Any] = {}
        self._destination_pool: dict[str, Any] = {}

    def attach(self, source_fd: int, destination_fd: int) -> None:
        """Maps the pools and connects the agents. Raises HostFailed without NIXL."""
        thread = self._mode == PROGRESS_THREAD
        with self._running():
            self._source.ask("attach", [source_fd])
            self._destination.ask("attach", [destination_fd, source_fd])
            made = self._source.ask("nixl_start", progress_thread=thread)
            mine = self._destination.ask("nixl_start", progress_thread=thread)
            self._destination.ask("nixl_connect", metadata=made.pop("metadata"))
            self._source.ask("nixl_connect", metadata=mine.pop("metadata"))
            self._source_pool, self._destination_pool = made, mine

    def move(self, case: Case, operation: str = READ, *, coalesced: bool = True) -> float:
        """Returns the seconds that raw NIXL takes for the case: the destination READs it, or the source WRITEs it."""
        mover, target, there = self._destination, self._source, self._source_pool
        if operation == WRITE:
            mover, target, there = self._source, self._destination, self._destination_pool
        with self._running():
            if self._mode == TARGET_POLLED:
                target.ask("nixl_poll", on=True)
            try:
                answer = mover.ask("nixl_move", operation=operation, case=case.to_json(), coalesced=coalesced, **there)
            finally:
                if self._mode == TARGET_POLLED:
                    target.ask("nixl_poll", on=False)
        return float(answer["seconds"])

    def detach(self) -> None:
        """Releases agents and pools."""
        with self._running():
            for host in (self._destination, self._source):
                host.ask("nixl_stop")
                host.ask("detach")


class GlooPair(_Pair):
    """Raw Gloo: a process group of both, in which the source sends."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__(environment)
        self._folder = TemporaryDirectory(prefix="kvgrpc-bench-")
        self._attached = 0

    def attach(self, source_fd: int, destination_fd: int) -> None:
        """Maps the pools and makes the group. Raises HostFailed without torch."""
        self._attached += 1
        meeting = f"{self._folder.name}/{self._attached}"
        with self._running():
            self._source.ask("attach", [source_fd])
            self._destination.ask("attach", [destination_fd])
            self._both("gloo_start", *({"meeting": meeting, "sends": sends} for sends in (True, False)))

    def move(self, **messages: int) -> float:
        """Returns the seconds that raw Gloo takes for the whole pool, from when both sides have begun until all has
        arrived. `messages` are arguments of RawGloo.move.
        """
        with self._running():
            sent, received = self._both("gloo_move", messages, messages)
        return float(received["ended_ns"] - max(sent["began_ns"], received["began_ns"])) / 1e9

    def detach(self) -> None:
        """Releases the group and the pools."""
        with self._running():
            self._both("gloo_stop")
            for host in (self._source, self._destination):
                host.ask("detach")

    def close(self) -> None:
        super().close()
        self._folder.cleanup()

    def _both(self, command: str, *arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Asks both at once, since each waits for the other. `arguments` are the source's and the destination's."""
        source, destination = arguments or ({}, {})
        with ThreadPoolExecutor(2) as threads:
            sender = threads.submit(self._source.ask, command, **source)
            receiver = threads.submit(self._destination.ask, command, **destination)
            return sender.result(), receiver.result()
