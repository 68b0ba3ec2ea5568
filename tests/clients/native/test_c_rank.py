"""A rank in C at a real lead does what a rank in Python does: bytes, steps, refusals, ends, and the way back."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from ctypes import byref, c_void_p
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvgrpc.engine import BlocksReturned, Engine, Rank, Received, content
from tests.clients.native.library import AttachOptions, NativeRank, Refused, check, library
from tests.clients.native.transfers import WAIT_S, end_of
from tests.engine.made import LAYER_BYTES, LAYERS, layout, made_bytes
from tests.engine.support import Lead, Side, new_key, received, tokens

pytestmark = pytest.mark.timeout(900)
PROMPT = tokens(32)


@pytest.fixture(scope="module")
def leads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lead, Lead]]:
    library()
    folder = tmp_path_factory.mktemp("leads")
    with ExitStack() as stack:
        p, d = (Lead(folder, name) for name in ("P", "D"))
        for lead in (p, d):
            stack.callback(lead.close)
        yield p.wait_ready(), d.wait_ready()


def view(rank: NativeRank) -> np.ndarray:
    """Returns a rank's pool, shape [layers, blocks, bytes]."""
    return rank.memory.reshape(LAYERS, -1, LAYER_BYTES)


@pytest.mark.parametrize("source", ["C", "Python"])
def test_bytes_move_between_ranks_of_both_languages(leads: tuple[Lead, Lead], source: str) -> None:
    native, python = (leads[0], leads[1]) if source == "C" else (leads[1], leads[0])
    with ExitStack() as stack:
        engine = stack.enter_context(Engine.attach(native.socket_path, pool=layout()))
        rank = NativeRank(engine.ticket)
        stack.callback(rank.close)
        side = Side(python)
        stack.callback(side.close)
        made = made_bytes([1, 2], seed=7)
        mine, theirs = (engine, side.engine) if source == "C" else (side.engine, engine)
        (view(rank) if source == "C" else side.view())[:, [1, 2]] = made
        handover = mine.finished_blocks([1, 2], content(PROMPT), transfer_key=new_key())
        mine.flush()
        pull = theirs.pull(handover.grant, content(PROMPT))
        pull.start([5, 6])
        assert isinstance(end_of(theirs, pull), Received)
        assert np.array_equal((side.view() if source == "C" else view(rank))[:, [5, 6]], made)


def test_a_pull_waits_for_the_steps_that_the_rank_reports(leads: tuple[Lead, Lead]) -> None:
    with ExitStack() as stack:
        engine = stack.enter_context(Engine.attach(leads[0].socket_path, pool=layout()))
        rank = NativeRank(engine.ticket)
        stack.callback(rank.close)
        side = Side(leads[1])
        stack.callback(side.close)
        handover = engine.finished_blocks([1, 2], content(PROMPT), transfer_key=new_key(), after_step=4)
        engine.flush()
        pull = side.engine.pull(handover.grant, content(PROMPT))
        pull.start([5, 6])
        side.round_trip()
        rank.layers_done(4, 0, 1)
        rank.step_done(3)
        made = view(rank)[:, [1, 2]] = made_bytes([1, 2], seed=9)
        side.round_trip()
        assert not pull.over
        rank.step_done(4)
        received(side.finish(pull))
        assert np.array_equal(side.read([5, 6]), made)


def test_refusals_have_their_code_and_reason(leads: tuple[Lead, Lead]) -> None:
    with ExitStack() as stack:
        engine = stack.enter_context(Engine.attach(leads[0].socket_path, pool=layout()))
        with pytest.raises(Refused, match=r"PERMISSION_DENIED \(NOT_OWNER\)"):
            NativeRank(replace(engine.ticket, secret=os.urandom(32)))
        rank = NativeRank(engine.ticket)
        stack.callback(rank.close)
        with pytest.raises(Refused, match=r"ALREADY_EXISTS \(ENGINE_ATTACHED\)"):
            NativeRank(engine.ticket)
        with pytest.raises(Refused, match=r"ALREADY_EXISTS \(ENGINE_ATTACHED\)"):
            check("kvgrpc_engine_attach", byref(AttachOptions(leads[0].socket_path.encode())), byref(c_void_p()))
        assert not rank.ended
    leads[0].wait_no_engine()
    kind = pytest.raises(Refused, match=r"FAILED_PRECONDITION \(POOL_KIND_MISMATCH\)")
    with Engine.attach(leads[0].socket_path, pool=layout(), private_memory=True) as private, kind:
        NativeRank(private.ticket)


def test_the_end_of_the_scheduler_is_the_end_of_the_service(leads: tuple[Lead, Lead]) -> None:
    leads[0].wait_no_engine()
    engine = Engine.attach(leads[0].socket_path, pool=layout())
    rank = NativeRank(engine.ticket)
    engine.close()
    assert rank.wait_ended(WAIT_S).startswith("UNAVAILABLE (PEER_LOST)")
    with pytest.raises(Refused, match=r"UNAVAILABLE \(PEER_LOST\)"):
        rank.step_done(1)
    rank.close()


def test_a_rank_that_is_closed_ends_its_engine(leads: tuple[Lead, Lead]) -> None:
    leads[0].wait_no_engine()
    with Engine.attach(leads[0].socket_path, pool=layout()):
        assert leads[0].has_engine()
    leads[0].wait_no_engine()
    with Engine.attach(leads[0].socket_path, pool=layout()) as engine:
        NativeRank(engine.ticket).close()
        leads[0].wait_no_engine()


def test_a_rank_without_another_lead_ends_with_its_lead(tmp_path: Path) -> None:
    lead = Lead(tmp_path, "P").wait_ready()
    try:
        with Engine.attach(lead.socket_path, pool=layout()) as engine:
            rank = NativeRank(engine.ticket)
            os.kill(engine.lead_pid, signal.SIGKILL)
            assert rank.wait_ended(WAIT_S).startswith("UNAVAILABLE (PEER_LOST)")
            rank.memory[:] = 1  # The memory is the engine's until the rank is closed.
            rank.close()
    finally:
        lead.close()


def test_a_rank_comes_back_to_the_next_lead_with_its_memory_and_steps(leads: tuple[Lead, Lead]) -> None:
    leads[1].wait_no_engine()
    with ExitStack() as stack:
        engine = stack.enter_context(Engine.launch(pool=layout(), flags=("--drain-s", "0")))
        rank = NativeRank(engine.ticket)
        stack.callback(rank.close)
        beside = stack.enter_context(Engine.attach(leads[1].socket_path, pool=layout()))
        there = stack.enter_context(Rank(beside.ticket))
        made = view(rank)[:, [1, 2]] = made_bytes([1, 2], seed=3)
        rank.step_done(8)
        rank.layers_done(9, 0, 2)
        before, lost = engine.incarnation, engine.finished_blocks([3], content(PROMPT[:16]), transfer_key=new_key())
        os.kill(engine.lead_pid, signal.SIGKILL)
        assert isinstance(end_of(engine, lost), BlocksReturned)
        assert engine.incarnation != before
        handover = engine.finished_blocks([1, 2], content(PROMPT), transfer_key=new_key(), after_step=8)
        engine.flush()
        pull = beside.pull(handover.grant, content(PROMPT))
        pull.start([5, 6])
        assert isinstance(end_of(beside, pull), Received)
        assert np.array_equal(there.memory.reshape(LAYERS, -1, LAYER_BYTES)[:, [5, 6]], made)
        rank.step_done(9)
        assert not rank.ended
