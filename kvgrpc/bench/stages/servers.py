"""What bandwidth is measured on: two servers with pools, and the baselines on the memory of these very pools."""

import contextlib
import os
import statistics
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from kvgrpc.bench.plan import Case, Plan, path_of
from kvgrpc.bench.stages.calls import Caller, Moved
from kvgrpc.bench.stages.hosts import Host, HostFailed
from kvgrpc.errors import InternalError, Reason
from kvgrpc.v1.common_pb2 import DataPath
from kvgrpc.wire.values import DATA_PATHS

Progress = Callable[[str], None]
READ = "READ"
WRITE = "WRITE"
PROGRESS_THREAD = "progress_thread"
TARGET_POLLED = "target_polled"
MODES = (TARGET_POLLED, PROGRESS_THREAD)
WHOLE_COPIES = 5


class RawPair:
    """Two baseline processes with a NIXL agent each; stopped but for their turns, since one mode burns cores."""

    def __init__(self, mode: str, environment: Mapping[str, str]) -> None:
        self._mode = mode
        self._source, self._destination = Host("baseline", environment), Host("baseline", environment)
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
        """Seconds that raw NIXL takes for the case: the destination READs it, or the source WRITEs it."""
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
        """Lets go of agents and pools."""
        with self._running():
            for host in (self._destination, self._source):
                host.ask("nixl_stop")
                host.ask("detach")

    def close(self) -> None:
        """Ends the processes."""
        self._source.close()
        self._destination.close()

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        with self._source.running(), self._destination.running():
            yield


@dataclass(frozen=True)
class Pools:
    """Two servers whose pools have the same shape, over one data path."""

    caller: Caller
    """All blocks of both pools are its own."""
    baseline: Host
    source: Host
    destination: Host
    pairs: dict[str, RawPair]
    """Raw NIXL on the same memory, by mode; what does not work here is left out."""

    def fill(self) -> None:
        """Gives every eight bytes of the source a value of their own, and clears the destination."""
        self.baseline.ask("fill")

    def check(self, case: Case, moved: Moved) -> None:
        """Raises InternalError unless the case was moved over its data path and, since `fill`, its bytes are there."""
        self.check_path(case, moved)
        if not self.baseline.ask("check", case=case.to_json())["equal"]:
            raise InternalError(Reason.INTERNAL, f"other bytes than were to move came over {case.data_path}")

    def check_path(self, case: Case, moved: Moved) -> None:
        """Raises InternalError unless the case was moved over its data path."""
        used = moved.transfer.paths[0].data_path
        if used != DATA_PATHS[path_of(case.data_path)]:
            raise InternalError(Reason.INTERNAL, f"the servers moved over {DataPath.Name(used)}, not {case.data_path}")


class Stage:
    """The processes for it. Use it as a context manager; `environment` is what all of them get beside our own."""

    def __init__(self, plan: Plan, progress: Progress, environment: Mapping[str, str] | None = None) -> None:
        self._plan = plan
        self._progress = progress
        self._environment = environment or {}
        self._ends = contextlib.ExitStack()
        self.source, self.destination, self.baseline = (
            self._ends.enter_context(contextlib.closing(Host(role, self._environment)))
            for role in ("server", "server", "baseline")
        )
        self._pairs: dict[str, RawPair] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    @contextlib.asynccontextmanager
    async def pools(
        self, data_path: str, block_bytes: int, *, raw: bool = True, checksums: bool = False
    ) -> AsyncIterator[Pools]:
        """Pools of the plan's size over one data path; `raw`: with raw NIXL beside them."""
        blocks = self._plan.pool_bytes // block_bytes
        arguments: dict[str, Any] = {"block_bytes": block_bytes, "blocks": blocks}
        arguments |= {"copy_threads": self._plan.copy_threads, "data_paths": [path_of(data_path)]}
        arguments["checksums"] = checksums
        source, source_fd = self.source.ask_fd("start", **arguments)
        destination, destination_fd = self.destination.ask_fd("start", **arguments)
        try:
            self.baseline.ask("attach", [destination_fd, source_fd])
            with self._raw(source_fd, destination_fd, MODES if raw else ()) as pairs:
                async with Caller(source["address"], destination["address"]) as caller:
                    await caller.allocate(blocks)
                    yield Pools(caller, self.baseline, self.source, self.destination, pairs)
        finally:
            os.close(source_fd)
            os.close(destination_fd)

    def copy_whole(self) -> float:
        """Bytes per second of one big memcpy between the pools of the last case."""
        seconds = [float(self.baseline.ask("copy_whole")["seconds"]) for _ in range(WHOLE_COPIES)]
        return self._plan.pool_bytes / statistics.median(seconds)

    @contextlib.contextmanager
    def _raw(self, source_fd: int, destination_fd: int, modes: Sequence[str]) -> Iterator[dict[str, RawPair]]:
        """The pairs of these modes that work here, attached."""
        attached: dict[str, RawPair] = {}
        for mode in modes:
            if mode not in self._pairs:
                self._pairs[mode] = self._ends.enter_context(contextlib.closing(RawPair(mode, self._environment)))
            try:
                self._pairs[mode].attach(source_fd, destination_fd)
            except HostFailed as error:
                self._progress(f"no raw NIXL ({mode}): {error}")
            else:
                attached[mode] = self._pairs[mode]
        try:
            yield attached
        finally:
            for pair in attached.values():
                pair.detach()
