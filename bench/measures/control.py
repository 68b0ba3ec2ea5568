"""Measures what a push costs the leads: processor time by the number of blocks, and by the number of waiting pushes.

It uses `bench.stages.leads`: both leads in this process, without sockets, gRPC and bytes.
"""

import contextlib
import cProfile
import gc
import os
import statistics
import time
from collections.abc import Iterator

import numpy as np

from bench.plan import BLOCK_TOKENS, Case, PushPlan
from bench.stages.calls import content, named_blocks
from bench.stages.leads import FINISH, REGISTER, RESERVE, Leads
from bench.stages.profiling import describe, new_profile
from kvgrpc.core.values.block_ids import Ids
from kvgrpc.v1 import common_pb2, handoff_pb2

_BATCH = 20


class LeadPushes:
    """Pushes between two leads, one after the other."""

    def __init__(self, blocks: int) -> None:
        self._leads = Leads(blocks)
        self.spent_s = 0.0
        """Processor time of both leads in seconds, without the engines' side of the calls."""
        self.profile: cProfile.Profile | None = None
        """Profile of the counted work, or None."""

    @property
    def core_s(self) -> float:
        """The part of `spent_s` that was spent in the cores."""
        return self._leads.core_s

    def register(self, blocks: Ids, of: common_pb2.Content) -> tuple[bytes, str]:
        """Reserves blocks at the destination and registers the push at the source. Returns key and transfer id."""
        key = os.urandom(16)
        own = named_blocks(blocks, self._leads.destination.description.incarnation)
        request = handoff_pb2.ReserveBlocksRequest(transfer_key=key, blocks=own, content=of)
        sent = request.SerializeToString()
        with self._counted():
            reply = self._leads.ask(self._leads.destination, RESERVE, sent)
        reserved = handoff_pb2.ReserveBlocksResponse.FromString(reply)
        sent = handoff_pb2.RegisterPushRequest(grant=reserved.grant).SerializeToString()
        with self._counted():
            self._leads.ask(self._leads.source, REGISTER, sent)
        return key, reserved.transfer.transfer_id

    def push(self, source: Ids, destination: Ids, of: common_pb2.Content) -> None:
        """Makes one push, from ReserveBlocks to the answer of WaitTransfer."""
        key, transfer_id = self.register(destination, of)
        own = named_blocks(source, self._leads.source.description.incarnation)
        part = handoff_pb2.PushPart(blocks=own, content=of, last=True)
        request = handoff_pb2.FinishedBlocksRequest(transfer_key=key, part=part)
        sent = request.SerializeToString()
        with self._counted():
            self._leads.ask(self._leads.source, FINISH, sent)
            self._leads.ended(transfer_id)

    def forget(self) -> None:
        """Lets the engines acknowledge what is over."""
        self._leads.forget()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        if self.profile is not None:
            self.profile.enable()
        began = time.thread_time()
        yield
        self.spent_s += time.thread_time() - began
        if self.profile is not None:
            self.profile.disable()


def handover_ms(plan: PushPlan, layout: str, *, tokens: bool = False) -> float:
    """Returns the median processor time, in milliseconds, of both leads for one push of the plan's many blocks.

    With `tokens`, the content is the prompt's token ids, whose digests are computed, instead of an opaque id.
    """
    case = Case("", 0, plan.control_blocks, layout, 0)
    pushing, of = LeadPushes(plan.control_blocks), _content(plan.control_blocks, tokens=tokens)
    spent = []
    with _no_collector():
        for _ in range(plan.handovers + 1):
            before = pushing.spent_s
            pushing.push(case.ids("source"), case.ids("destination"), of)
            spent.append(pushing.spent_s - before)
            pushing.forget()
    return statistics.median(spent[1:]) * 1e3


def profile(plan: PushPlan) -> list[str]:
    """Returns a profile, as lines, of both leads' processor time for one push."""
    case = Case("", 0, plan.control_blocks, "scattered", 0)
    pushing, of = LeadPushes(plan.control_blocks), _content(plan.control_blocks)
    pushing.push(case.ids("source"), case.ids("destination"), of)
    pushing.profile = new_profile()
    for _ in range(plan.handovers):
        pushing.push(case.ids("source"), case.ids("destination"), of)
        pushing.forget()
    return describe(pushing.profile, f"one push of {plan.control_blocks} blocks, both leads alone", plan.handovers)


def waiting_cost(plan: PushPlan) -> tuple[float, float]:
    """Returns (us, ratio): processor time of both cores for a push of one block beside few waiting registrations, and
    its time beside many over that. The ratio is the median of pairs of batches, one after the other.
    """
    few, many = _beside(plan.waiting_few), _beside(plan.waiting_many)
    pairs = []
    with _no_collector():
        for _ in range(max(plan.waiting_pushes // _BATCH, 1) + 1):
            pairs.append((_batch_s(few), _batch_s(many)))
    del pairs[0]
    return statistics.median(a for a, _ in pairs) * 1e6, statistics.median(b / a for a, b in pairs)


def _beside(waiting: int) -> LeadPushes:
    """Returns leads with `waiting` registrations that wait: reserved at the destination, registered at the source."""
    pushing = LeadPushes(waiting + 1)
    for block in range(1, waiting + 1):
        pushing.register(np.array([block]), content(1))
    return pushing


def _batch_s(pushing: LeadPushes) -> float:
    """Returns the seconds of both cores for one push, over a batch."""
    block, of = np.zeros(1, dtype=np.int64), content(1)
    before = pushing.core_s
    for _ in range(_BATCH):
        pushing.push(block, block, of)
    spent = pushing.core_s - before
    pushing.forget()
    return spent / _BATCH


def _content(blocks: int, *, tokens: bool = False) -> common_pb2.Content:
    if not tokens:
        return content(blocks)
    return common_pb2.Content(tokens=common_pb2.TokenContent(token_ids=range(blocks * BLOCK_TOKENS)))


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Turns the garbage collector off: a run would visit everything that this process ever made."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
