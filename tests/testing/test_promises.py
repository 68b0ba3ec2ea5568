"""The conformance kit: the minimal engine keeps every promise, and planted bugs are caught by their promise's name."""

import os
from contextlib import closing
from typing import Any
from unittest import SkipTest

import pytest

from kvgrpc.core.values.layout import Group, GroupKind, uniform_layout
from kvgrpc.engine import Engine
from kvgrpc.testing import PROMISES, BrokenPromise, Counterpart, play
from tests.engine.support import Lead
from tests.testing.broken import BROKEN
from tests.testing.minimal import MinimalAdapter
from tests.testing.split import SplitAdapter

LOST_LEAD = "a_lost_lead_is_survived"
OF_PUSHES = {"pushed_blocks_stay", "parts_name_their_step", "given_up_pushes_end"}
OWN_LEAD = {LOST_LEAD, "layers_are_reported_when_done", *OF_PUSHES}
"""Promises that are played with a lead of the engine's own: it is killed, or a destination registers at its address, to
which an earlier engine's peers may still be connected.
"""
OF_RANKS = "late_ranks_are_waited_for"
OF_BYTES = [
    "handed_over_blocks_are_not_written", "hand_overs_name_their_step", "loads_name_their_step",
    "what_failed_is_not_used", "parts_name_their_step", "layers_are_reported_when_done", OF_RANKS,
]  # fmt: skip
"""Promises that depend on which rank has written which bytes."""
Others = dict[int, Counterpart]


def played(kind: type[MinimalAdapter], promise: str, lead: Lead, others: Others) -> None:
    """Plays a promise, at the common lead if that will do."""
    with kind("launch" if promise in OWN_LEAD else lead.socket_path) as engine:
        play(promise, engine, others[kind.RANKS])
    lead.wait_no_engine()


@pytest.mark.parametrize("promise", [it for it in PROMISES if it != OF_RANKS])
def test_the_minimal_engine_keeps_its_promises(promise: str, lead: Lead, others: Others) -> None:
    played(MinimalAdapter, promise, lead, others)


@pytest.mark.parametrize("promise", OF_BYTES)
def test_the_minimal_engine_keeps_its_promises_with_two_ranks(promise: str, lead: Lead, others: Others) -> None:
    played(SplitAdapter, promise, lead, others)


@pytest.mark.parametrize(("promise", "kind"), BROKEN, ids=lambda it: it if isinstance(it, str) else it.__name__)
def test_a_broken_engine_is_caught_by_the_name_of_its_promise(
    promise: str, kind: type[MinimalAdapter], lead: Lead, others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvgrpc.testing.scene.WAIT_S", 3.0)
    monkeypatch.setattr("kvgrpc.testing.scene.QUIET_S", 0.5)  # a busy machine moves what comes too early late
    with pytest.raises(BrokenPromise) as caught:
        played(kind, promise, lead, others)
    lead.wait_no_engine()
    assert caught.value.promise == promise
    assert f"Read {promise} in docs/integrating.md" in str(caught.value)


def test_every_promise_has_an_engine_that_breaks_it() -> None:
    assert {promise for promise, _ in BROKEN} == set(PROMISES)


def test_an_engine_that_ends_with_its_lead_is_not_asked_to_survive_it(lead: Lead, other: Counterpart) -> None:
    with MinimalAdapter(lead.socket_path) as engine, pytest.raises(SkipTest, match="ends with it"):
        play(LOST_LEAD, engine, other)


class Unwritten(MinimalAdapter):
    """An adapter whose author has not written one method yet."""

    def abort(self, request_id: str) -> None:
        raise NotImplementedError


class NeverPreempting(MinimalAdapter):
    def preempt(self, request_id: str) -> None:
        raise NotImplementedError


def test_only_an_engine_that_never_preempts_may_leave_a_play_out(lead: Lead, other: Counterpart) -> None:
    with NeverPreempting(lead.socket_path) as engine, pytest.raises(SkipTest, match="never preempts"):
        play("preempted_blocks_are_taken_back", engine, other)
    lead.wait_no_engine()
    with Unwritten(lead.socket_path) as engine, pytest.raises(BrokenPromise, match="NotImplementedError"):
        play("who_leaves_lets_go", engine, other)
    lead.wait_no_engine()


class PullsOnly(MinimalAdapter):
    """An adapter without the optional methods."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("push", "reserve", "compute_layer"):
            raise AttributeError(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    ("promise", "method"),
    [
        ("pushed_blocks_stay", "push"),
        ("layers_are_reported_when_done", "compute_layer"),
        ("reserved_blocks_stay", "reserve"),
        (OF_RANKS, "compute_rank"),
    ],
)
def test_a_play_that_needs_a_method_which_the_adapter_lacks_says_so(
    promise: str, method: str, lead: Lead, others: Others
) -> None:
    with pytest.raises(SkipTest, match=f"no method {method}"):
        played(PullsOnly, promise, lead, others)
    lead.wait_no_engine()


def test_a_push_of_an_engine_with_one_layer_has_no_part(lead: Lead) -> None:
    pool = uniform_layout(Group("full", GroupKind.FULL_ATTENTION, 1, 16, 24, 2, 8, "float16"), 1024)
    with (
        closing(Engine.attach(lead.socket_path, pool=pool)) as engine,
        Counterpart(engine) as other,
        pytest.raises(SkipTest, match="two layers"),
    ):
        other.push([1, 2, 3], os.urandom(16), whole=False)
    lead.wait_no_engine()
