"""The stage for bandwidth: two servers with pools, and the baselines on the memory of the same pools."""

import os
import statistics
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from typing import Any, Self

from bench.plan import COLLECTIVE, OVER_TCP, Case, Plan, path_of
from bench.stages.calls import Caller, Moved
from bench.stages.hosts import Host, HostFailed
from bench.stages.raw_pairs import MODES, GlooPair, RawPair
from bench.told import Told
from kvgrpc.errors import InternalError, Reason
from kvgrpc.v1.common_pb2 import DataPath
from kvgrpc.wire.values import DATA_PATHS

WHOLE_COPIES = 5


@dataclass(frozen=True)
class Pools:
    """Two servers whose pools have the same shape, over one data path."""

    caller: Caller
    """Client that holds all blocks of both pools."""
    baseline: Host
    source: Host
    destination: Host
    pairs: dict[str, RawPair]
    """Raw NIXL on the same memory, by mode, without modes that do not work here. Over collective it uses TCP."""
    gloo: GlooPair | None
    """Raw Gloo on the same memory; over collective only."""

    def fill(self) -> None:
        """Gives every eight bytes of the source a distinct value, and clears the destination."""
        self.baseline.ask("fill")

    def check(self, case: Case, moved: Moved) -> None:
        """Raises InternalError unless the case moved over its data path and the destination has the bytes of `fill`."""
        self.check_path(case, moved)
        if not self.baseline.ask("check", case=case.to_json())["equal"]:
            raise InternalError(Reason.INTERNAL, f"other bytes than were to move came over {case.data_path}")

    def check_path(self, case: Case, moved: Moved) -> None:
        """Raises InternalError unless the case moved over its data path."""
        used = moved.transfer.paths[0].data_path
        if used != DATA_PATHS[path_of(case.data_path)]:
            raise InternalError(Reason.INTERNAL, f"the servers moved over {DataPath.Name(used)}, not {case.data_path}")


class ServerStage:
    """The processes of the stage, which get `environment` in addition to ours. Use it as a context manager."""

    def __init__(self, plan: Plan, told: Told, environment: Mapping[str, str] | None = None) -> None:
        self._plan = plan
        self._told = told
        self._environment = environment or {}
        self._ends = ExitStack()
        self.source, self.destination, self.baseline = (
            self._ends.enter_context(closing(Host(role, self._environment)))
            for role in ("server", "server", "baseline")
        )
        self._pairs: dict[tuple[str, bool], RawPair] = {}
        self._gloo: GlooPair | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    @asynccontextmanager
    async def pools(
        self, data_path: str, block_bytes: int, *, raw: bool = True, checksums: bool = False
    ) -> AsyncIterator[Pools]:
        """Yields pools of the plan's size over one data path. `raw` adds raw NIXL, which collective always gets."""
        blocks = self._plan.pool_bytes // block_bytes
        arguments: dict[str, Any] = {"block_bytes": block_bytes, "blocks": blocks}
        arguments |= {"copy_threads": self._plan.copy_threads, "data_paths": [path_of(data_path)]}
        arguments["checksums"] = checksums
        source, source_fd = self.source.ask_fd("start", **arguments)
        destination, destination_fd = self.destination.ask_fd("start", **arguments)
        collective = path_of(data_path) == COLLECTIVE
        try:
            self.baseline.ask("attach", [destination_fd, source_fd])
            with (
                self._raw(source_fd, destination_fd, MODES if raw or collective else (), tcp=collective) as pairs,
                self._raw_gloo(source_fd, destination_fd, collective) as gloo,
            ):
                async with Caller(source["address"], destination["address"]) as caller:
                    await caller.allocate(blocks)
                    yield Pools(caller, self.baseline, self.source, self.destination, pairs, gloo)
        finally:
            os.close(source_fd)
            os.close(destination_fd)

    def copy_whole(self) -> float:
        """Returns the bytes per second of one big memcpy between the pools of the last case."""
        seconds = [float(self.baseline.ask("copy_whole")["seconds"]) for _ in range(WHOLE_COPIES)]
        return self._plan.pool_bytes / statistics.median(seconds)

    @contextmanager
    def _raw(
        self, source_fd: int, destination_fd: int, modes: Sequence[str], *, tcp: bool
    ) -> Iterator[dict[str, RawPair]]:
        """Yields the pairs of those modes that work here, attached. With `tcp`, TCP is their only transport."""
        attached: dict[str, RawPair] = {}
        for mode in modes:
            pair = self._pairs.get((mode, tcp))
            if pair is None:
                environment = {**self._environment, **(OVER_TCP if tcp else {})}
                pair = self._pairs[mode, tcp] = self._ends.enter_context(closing(RawPair(mode, environment)))
            try:
                pair.attach(source_fd, destination_fd)
            except HostFailed as error:
                self._told.note(f"no raw NIXL ({mode}): {error}")
            else:
                attached[mode] = pair
        try:
            yield attached
        finally:
            for pair in attached.values():
                pair.detach()

    @contextmanager
    def _raw_gloo(self, source_fd: int, destination_fd: int, wanted: bool) -> Iterator[GlooPair | None]:
        """Yields the pair, attached; None if it is not wanted, or does not work here."""
        if not wanted:
            yield None
            return
        if self._gloo is None:
            self._gloo = self._ends.enter_context(closing(GlooPair(self._environment)))
        try:
            self._gloo.attach(source_fd, destination_fd)
        except HostFailed as error:
            self._told.note(f"no raw Gloo: {error}")
            yield None
            return
        try:
            yield self._gloo
        finally:
            self._gloo.detach()
