"""Events that wake a sleeping engine core; see tests/vllm/cores.py."""

import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

from kvgrpc.client import connect_sync
from kvgrpc.integrations.vllm import waking
from kvgrpc.integrations.vllm.waking import Bell
from tests.vllm.cores import Core, Cores, request_of
from tests.vllm.engines import wait_until

WAIT_S = 60.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def released(core: Core) -> None:
    with connect_sync(core.side.engine.address) as lead:
        for lease in lead.list_leases().leases:
            lead.release_lease(lease.lease_id)


def handed_over(core: Core, name: str) -> None:
    """Hands over a prompt whose blocks are kept, and waits until there is no other news."""
    core.prefilled(name)
    wait_until(lambda: core.step() and bool(released_leases(core)))
    wait_until(lambda: core.step() and not core.hooks.has_news)


def released_leases(core: Core) -> list[Any]:
    with connect_sync(core.side.engine.address) as lead:
        return list(lead.list_leases().leases)


def test_a_sleeper_is_woken_once_when_its_blocks_come_back_and_has_a_step_to_make(cores: Cores) -> None:
    p, _ = cores
    handed_over(p, "p")
    rung = threading.Semaphore(0)
    p.hooks.sleeps(rung.release)
    p.hooks.sleeps(rung.release)
    assert not rung.acquire(blocking=False)
    released(p)
    assert rung.acquire(timeout=WAIT_S)
    assert p.hooks.has_news
    wait_until(lambda: p.step() and p.used() == 0)
    assert not p.hooks.has_news
    assert not rung.acquire(blocking=False)


def test_who_holds_nothing_is_not_woken_and_has_no_step_to_make(cores: Cores) -> None:
    p, d = cores
    d.hooks.sleeps(lambda: pytest.fail("for nothing"))
    p.prefilled("p")
    assert not d.hooks.has_news


def test_blocks_of_an_engine_without_kvgrpc_are_looked_for_until_its_lead_is_gone(
    cores: Cores, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, _ = cores
    handed_over(p, "p")
    monkeypatch.setattr(p.side, "match", None)  # makes a hook fail
    p.hooks.match(request_of("q", None), 0)
    assert p.hooks.has_news
    wait_until(lambda: p.step() and p.used() == 0)
    assert not p.hooks.has_news


def test_a_bell_rings_once_each_time_it_is_armed(pipe: tuple[int, int]) -> None:
    there, here = pipe
    bell, rung = Bell(there), threading.Semaphore(0)
    os.write(here, b"x")
    for _ in range(3):
        assert not rung.acquire(blocking=False)
        bell.arm(rung.release)
        assert rung.acquire(timeout=WAIT_S)
    bell.close()
    bell.close()
    bell.arm(rung.release)
    assert not rung.acquire(blocking=False)


@pytest.mark.parametrize("armed", [True, False])
def test_a_bell_ends_though_nothing_came(pipe: tuple[int, int], armed: bool) -> None:
    bell = Bell(pipe[0])
    if armed:
        bell.arm(lambda: pytest.fail("for nothing"))
    bell.close()
    assert "kvgrpc-bell" not in {thread.name for thread in threading.enumerate()}


def test_an_engine_core_that_sleeps_is_woken_by_its_own_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineCoreProc, "_notify_idle_state_callbacks", EngineCoreProc._notify_idle_state_callbacks)
    rings: list[waking.Ring] = []
    waking.tell_of_sleep(rings.append)
    put: list[Any] = []
    core = SimpleNamespace(_idle_state_callbacks=[], input_queue=SimpleNamespace(put_nowait=put.append))
    EngineCoreProc._notify_idle_state_callbacks(core)
    (ring,) = rings
    ring()
    assert put == [(EngineCoreRequestType.WAKEUP, None)]
