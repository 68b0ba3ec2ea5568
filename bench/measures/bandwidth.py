"""Bandwidth of pulls: kvgrpc and the baselines move whole pools in turn, over the same memory."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from bench.measures.between_hosts import Others, figures, others
from bench.measures.timed_pairs import quartiles
from bench.plan import COLLECTIVE, Case, PullPlan
from bench.results.pulls import PullCase
from bench.stages.servers import Pools, ServerStage
from bench.told import Told


@dataclass(frozen=True)
class MoveTimes:
    """Seconds that each way took for one case, in one round."""

    ours: float
    wire: float
    """The part of `ours` in which postings were in flight."""
    memcpy: float
    nixl: dict[str, float]
    """Seconds by mode; empty without NIXL, and over collective: see `others`."""
    others: Others
    at_once: float | None
    """Seconds with checksums, right after the hand-over, while the source still computes its sums. None without
    checksums.
    """
    without: float | None
    """Seconds without checksums; None if `ours` has none."""
    uncoalesced: dict[str, float]
    """Seconds like `nixl`, with one descriptor a block, for cases over nixl; empty if that is the same, and with
    checksums.
    """


class PullBandwidth:
    """Measures the cases of one pool size, one data path after the other."""

    def __init__(self, plan: PullPlan, stage: ServerStage, told: Told) -> None:
        self._plan = plan
        self._stage = stage
        self._told = told
        self._coalescing: list[float] = []

    @property
    def coalescing_ratio(self) -> float | None:
        """Speed of pulls of contiguous 16 KB blocks over nixl, over that of raw NIXL with one descriptor a block; None
        with checksums.
        """
        return statistics.median(self._coalescing) if self._coalescing else None

    async def run(self) -> list[PullCase]:
        """Measures all cases of the plan."""
        found = []
        for block_bytes in self._plan.block_bytes:
            for data_path in self._plan.data_paths:
                async with self._stage.pools(data_path, block_bytes, checksums=self._plan.checksum) as pools:
                    found += [await self._measure(case, pools) for case in self._plan.cases(data_path, block_bytes)]
        return found

    async def _measure(self, case: Case, pools: Pools) -> PullCase:
        self._told(case.title)
        pools.fill()
        pulled = await pools.caller.pull(case.ids("source"), case.ids("destination"))
        pools.check(case, pulled)
        # The first round is not counted: it also maps memory and connects.
        moves = [await self._round(case, pools) for _ in range(self._plan.repeats + 1)][1:]
        best = min(moves[0].nixl, key=lambda mode: statistics.median(move.nixl[mode] for move in moves), default="")
        if best and moves[0].uncoalesced:
            self._coalescing = [move.uncoalesced[best] / move.ours for move in moves]
        return _result(case, moves, pulled.transfer.paths[0].descriptor_count, best)

    async def _round(self, case: Case, pools: Pools) -> MoveTimes:
        """Measures each way once; ours between the baselines, so that drift favours no way."""
        memcpy = pools.baseline.ask("copy", case=case.to_json(), threads=case.threads)["seconds"]
        ids = case.ids("source"), case.ids("destination")
        at_once = (await pools.caller.pull(*ids)).seconds if self._plan.checksum else None
        ours = await pools.caller.pull(*ids, lambda: pools.source.ask("prefetched"))
        pools.check_path(case, ours)
        without = await self._without_checksums(case, pools) if self._plan.checksum else None
        pairs = {} if case.data_path == COLLECTIVE else pools.pairs
        nixl = {mode: pair.move(case) for mode, pair in pairs.items()}
        uncoalesced, smallest = {}, case.block_bytes == min(self._plan.block_bytes)
        if (case.data_path, case.layout) == ("nixl", "contiguous") and smallest and not self._plan.checksum:
            uncoalesced = {mode: pair.move(case, coalesced=False) for mode, pair in pairs.items()}
        beside = others(case, pools)
        return MoveTimes(ours.seconds, ours.phase_s("wire"), memcpy, nixl, beside, at_once, without, uncoalesced)

    async def _without_checksums(self, case: Case, pools: Pools) -> float:
        for server in (pools.source, pools.destination):
            server.ask("compare", on=False)
        try:
            return (await pools.caller.pull(case.ids("source"), case.ids("destination"))).seconds
        finally:
            for server in (pools.source, pools.destination):
                server.ask("compare", on=True)


def _result(case: Case, moves: list[MoveTimes], descriptors: int, mode: str) -> PullCase:
    def gbps(seconds: Callable[[MoveTimes], float]) -> float:
        return case.nbytes / statistics.median(map(seconds, moves)) / 1e9

    beside, spread = figures(case, [(move.ours, move.others) for move in moves])
    if mode:
        spread["raw_nixl_gbps"] = quartiles([case.nbytes / move.nixl[mode] / 1e9 for move in moves])
        spread["ratio_raw_nixl"] = quartiles([move.nixl[mode] / move.ours for move in moves])
    return PullCase(
        name=case.title,
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
        ratio_without=_ratio(moves, lambda move: move.without, lambda move: move.ours),
        ratio_at_once=_ratio(moves, lambda move: move.without, lambda move: move.at_once),
        quartiles={
            "gbps": quartiles([case.nbytes / move.ours / 1e9 for move in moves]),
            "control_ms": quartiles([(move.ours - move.wire) * 1e3 for move in moves]),
            "ratio_memcpy": quartiles([move.memcpy / move.ours for move in moves]),
            "memcpy_gbps": quartiles([case.nbytes / move.memcpy / 1e9 for move in moves]),
            **spread,
        },
        **beside,
    )


def _ratio(
    moves: list[MoveTimes], baseline: Callable[[MoveTimes], float | None], measured: Callable[[MoveTimes], float | None]
) -> float | None:
    """Returns the median over the rounds; None if it was not measured."""
    pairs = [(baseline(move), measured(move)) for move in moves]
    found = [one / other for one, other in pairs if one is not None and other is not None]
    return statistics.median(found) if found else None
