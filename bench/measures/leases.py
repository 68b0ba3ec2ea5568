"""Measures what a lease costs the lead's core: grant, renew and expire, beside few and many live leases."""

import secrets
import statistics
import time
from dataclasses import dataclass

import numpy as np

from bench.plan import BLOCK_TOKENS, PullPlan, pool
from kvgrpc.core import events
from kvgrpc.core.actions import Action, HandedOver, Reply
from kvgrpc.core.node import Node
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.content import ContentId
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.limits import PROTOCOL_MAX, PROTOCOL_MIN, Limits

_LONG_S = 1e6
_SHORT_S = 30.0
_BATCH = 20
_KEPT_BYTES = 1 << 40
"""Bytes that the one caller's leases may keep: those of 100,000 leases are over the default."""


@dataclass(frozen=True)
class LeaseCost:
    """Cost of one lease from grant to expiry."""

    few_us: float
    """Microseconds beside few live leases."""
    ratio: float
    """Cost beside many live leases over that beside few."""


def measure(plan: PullPlan) -> LeaseCost:
    """Measures batches of cycles beside few and many leases in turn. Returns medians."""
    few, many = Lead(plan.leases_few), Lead(plan.leases_many)
    pairs = []
    for _ in range(max(plan.lease_cycles // _BATCH, 1) + 1):
        pairs.append((few.cycles(_BATCH), many.cycles(_BATCH)))
    pairs = pairs[1:]
    return LeaseCost(
        few_us=statistics.median(a for a, _ in pairs) * 1e6,
        ratio=statistics.median(b / a for a, b in pairs),
    )


class Lead:
    """A node with `alive` leases that outlive the measurement, with a clock of its own."""

    def __init__(self, alive: int) -> None:
        room = {"kept_bytes": _KEPT_BYTES, "kept_bytes_per_caller": _KEPT_BYTES}
        self._node = Node(Limits(lease_cap_s=_LONG_S, **room))
        self._now = 0.0
        self._calls = 0
        layout = pool(16 << 10, 64).layout()
        engine = EngineDescription(
            engine_id="bench",
            incarnation=1,
            address="127.0.0.1:1",
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            weights_revision="",
            pool=layout,
            pool_kind=PoolKind.ENGINE_MANAGED,
            world_size=1,
        )
        self._handle(events.LifeBegan(1, secrets.token_bytes(32), engine))
        for _ in range(alive):
            self._grant(_LONG_S)

    def cycles(self, count: int) -> float:
        """Grants, renews and expires `count` leases. Returns the seconds for each."""
        began = time.perf_counter()
        granted = [self._grant(_SHORT_S) for _ in range(count)]
        self._now += _SHORT_S / 1000
        for lease_id in granted:
            self._handle(events.RenewLeases(self._call(), (events.LeaseRef(lease_id),)))
        live = len(self._node.state.send.leases)
        self._now += _SHORT_S + 1
        self._handle(events.Tick())
        seconds = time.perf_counter() - began
        assert len(self._node.state.send.leases) == live - count, "leases did not expire, or others did"
        return seconds / count

    def _grant(self, ttl_s: float) -> str:
        event = events.FinishedBlocks(
            call=self._call(),
            key=secrets.token_bytes(16),
            blocks=((0, np.zeros(1, dtype=np.int64)),),
            content=ContentId(BLOCK_TOKENS, opaque=b"bench"),
            ttl_s=ttl_s,
            transfer=False,
        )
        for action in self._handle(event):
            if isinstance(action, Reply) and isinstance(action.answer, HandedOver):
                return action.answer.lease.id
        raise AssertionError("the grant was refused")

    def _call(self) -> events.Call:
        self._calls += 1
        return events.Call(self._calls, "bench")

    def _handle(self, event: events.Event) -> list[Action]:
        return self._node.handle(event, self._now)
