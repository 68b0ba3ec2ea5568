"""Bandwidth: whole pools moved by us and by the baselines, in turn, on the same memory."""

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvgrpc.bench.hosts import Host, HostFailed
from kvgrpc.bench.plan import Case, Plan
from kvgrpc.bench.pulls import Pulled, Puller
from kvgrpc.bench.result import CaseResult
from kvgrpc.errors import InternalError, Reason

Progress = Callable[[str], None]
PROGRESS_THREAD = "progress_thread"
TARGET_POLLED = "target_polled"
MODES = (TARGET_POLLED, PROGRESS_THREAD)
WHOLE_COPIES = 5


@dataclass(frozen=True)
class Move:
    """Seconds that one case took by one way, in one round."""

    ours: float
    wire: float
    """Of ours, the part in which postings were in flight."""
    memcpy: float
    nixl: dict[str, float]
    """By mode; empty without NIXL."""
    uncoalesced: dict[str, float]
    """As `nixl`, with one descriptor a block; empty where that is the same."""


class RawPair:
    """Two baseline processes with a NIXL agent each; stopped but for their turns, since one mode burns cores."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._source, self._destination = Host("baseline"), Host("baseline")
        self._remote: dict[str, Any] = {}

    def attach(self, source_fd: int, destination_fd: int) -> None:
        """Maps the pools and connects the agents. Raises HostFailed without NIXL."""
        thread = self._mode == PROGRESS_THREAD
        with self._running():
            self._source.ask("attach", [source_fd])
            self._destination.ask("attach", [destination_fd, source_fd])
            made = self._source.ask("nixl_start", progress_thread=thread)
            mine = self._destination.ask("nixl_start", progress_thread=thread)
            self._destination.ask("nixl_connect", metadata=made.pop("metadata"))
            self._source.ask("nixl_connect", metadata=mine["metadata"])
            self._remote = made

    def read(self, case: Case, *, coalesced: bool = True) -> float:
        """Seconds that raw NIXL takes for the case."""
        with self._running():
            if self._mode == TARGET_POLLED:
                self._source.ask("nixl_poll", on=True)
            try:
                answer = self._destination.ask("nixl_read", case=case.to_json(), coalesced=coalesced, **self._remote)
            finally:
                if self._mode == TARGET_POLLED:
                    self._source.ask("nixl_poll", on=False)
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


class Bandwidth:
    """Measures the cases of one pool size over one data path after the other."""

    def __init__(self, plan: Plan, source: Host, destination: Host, baseline: Host, progress: Progress) -> None:
        self._plan = plan
        self._source = source
        self._destination = destination
        self._baseline = baseline
        self._progress = progress
        self._pairs = {mode: RawPair(mode) for mode in MODES}
        self._coalescing: list[float] = []

    def close(self) -> None:
        for pair in self._pairs.values():
            pair.close()

    @property
    def coalescing_ratio(self) -> float | None:
        """Contiguous 16 KB blocks pulled over nixl, over raw NIXL with one descriptor a block."""
        return statistics.median(self._coalescing) if self._coalescing else None

    async def run(self) -> list[CaseResult]:
        """All cases of the plan."""
        found = []
        for block_bytes in self._plan.block_bytes:
            for data_path in self._plan.data_paths:
                found += await self._one_pool(data_path, block_bytes)
        return found

    def copy_whole(self) -> float:
        """Bytes per second of one big memcpy between the pools that are attached."""
        seconds = [float(self._baseline.ask("copy_whole")["seconds"]) for _ in range(WHOLE_COPIES)]
        return self._plan.pool_bytes / statistics.median(seconds)

    async def _one_pool(self, data_path: str, block_bytes: int) -> list[CaseResult]:
        cases = self._plan.cases(data_path, block_bytes)
        blocks = cases[0].blocks
        arguments = {"block_bytes": block_bytes, "blocks": blocks, "copy_threads": self._plan.copy_threads}
        source, source_fd = self._source.ask_fd("start", data_paths=[data_path], **arguments)
        destination, destination_fd = self._destination.ask_fd("start", data_paths=[data_path], **arguments)
        try:
            self._baseline.ask("attach", [destination_fd, source_fd])
            with self._nixl(source_fd, destination_fd) as pairs:
                async with Puller(source["address"], destination["address"]) as puller:
                    await puller.allocate(blocks)
                    return [await self._measure(case, puller, pairs) for case in cases]
        finally:
            os.close(source_fd)
            os.close(destination_fd)

    @contextlib.contextmanager
    def _nixl(self, source_fd: int, destination_fd: int) -> Iterator[dict[str, RawPair]]:
        """The pairs that work here, attached."""
        attached: dict[str, RawPair] = {}
        for mode, pair in self._pairs.items():
            try:
                pair.attach(source_fd, destination_fd)
            except HostFailed as error:
                self._progress(f"no raw NIXL ({mode}): {error}")
            else:
                attached[mode] = pair
        try:
            yield attached
        finally:
            for pair in attached.values():
                pair.detach()

    async def _measure(self, case: Case, puller: Puller, pairs: dict[str, RawPair]) -> CaseResult:
        self._progress(f"{case.data_path} {case.blocks} x {case.block_bytes >> 10} KB {case.layout}")
        self._baseline.ask("fill")
        descriptors = (await self._pull(case, puller)).transfer.paths[0].descriptors
        if not self._baseline.ask("check", case=case.to_json())["equal"]:
            raise InternalError(Reason.INTERNAL, f"a pull over {case.data_path} moved other bytes than it was to move")
        # The first round of each way is slower by what it maps and connects, and is not counted.
        moves = [await self._round(case, puller, pairs) for _ in range(self._plan.repeats + 1)][1:]
        best = min(pairs, key=lambda mode: statistics.median(move.nixl[mode] for move in moves), default="")
        if best and moves[0].uncoalesced and case.data_path == "nixl":
            self._coalescing = [move.uncoalesced[best] / move.ours for move in moves]
        return _result(case, moves, descriptors, best)

    async def _round(self, case: Case, puller: Puller, pairs: dict[str, RawPair]) -> Move:
        """Each way once; ours between the baselines, so that what drifts favours nobody."""
        memcpy = self._baseline.ask("copy", case=case.to_json(), threads=case.threads)["seconds"]
        ours = await self._pull(case, puller)
        nixl = {mode: pair.read(case) for mode, pair in pairs.items()}
        uncoalesced = {}
        if case.layout == "contiguous" and case.block_bytes == min(self._plan.block_bytes):
            uncoalesced = {mode: pair.read(case, coalesced=False) for mode, pair in pairs.items()}
        return Move(ours.seconds, ours.phase_s("wire"), memcpy, nixl, uncoalesced)

    async def _pull(self, case: Case, puller: Puller) -> Pulled:
        """One pull of ours."""
        grant = await puller.hand_over(case.ids("source"))
        pulled = await puller.pull(grant, case.ids("destination"))
        path = pulled.transfer.paths[0]
        if path.data_path != case.data_path:
            raise InternalError(Reason.INTERNAL, f"the servers moved over {path.data_path}, not {case.data_path}")
        return pulled


def _result(case: Case, moves: list[Move], descriptors: int, mode: str) -> CaseResult:
    def gbps(seconds: Callable[[Move], float]) -> float:
        return case.nbytes / statistics.median(map(seconds, moves)) / 1e9

    return CaseResult(
        datapath=case.data_path,
        block_bytes=case.block_bytes,
        blocks=case.blocks,
        layout=case.layout,
        threads=case.threads,
        descriptors=descriptors,
        gbps=gbps(lambda move: move.ours),
        control_ms=statistics.median(move.ours - move.wire for move in moves) * 1e3,
        memcpy_gbps=gbps(lambda move: move.memcpy),
        ratio_memcpy=statistics.median(move.memcpy / move.ours for move in moves),
        raw_nixl_gbps=gbps(lambda move: move.nixl[mode]) if mode else None,
        ratio_raw_nixl=statistics.median(move.nixl[mode] / move.ours for move in moves) if mode else None,
        raw_nixl_mode=mode,
    )
