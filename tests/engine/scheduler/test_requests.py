"""The policy on two real engines: requests go through their hooks, and KV goes where they say."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgrpc.core.policy.values import (
    DROPPED,
    Give,
    LoadEnded,
    ModeChoice,
    OnLoss,
    Provisional,
    ReservedAt,
    SendEnded,
    TakeLost,
)
from kvgrpc.core.values.layout import Group, GroupKind, uniform_layout
from kvgrpc.engine import Engine
from kvgrpc.engine.scheduler import Offer, ScheduledRequest, Scheduler, Source
from kvgrpc.errors import DeadlineExceeded, Reason, Unavailable
from tests.engine.conftest import SETTINGS, Attach, Leads
from tests.engine.made import LAYER_BYTES, layout
from tests.engine.scheduler.schedulers import COMPLETE, PROMPT, TABLE, TARGET, At, R, give, same
from tests.engine.support import WAIT_S, Lead, Side, ended, new_key, refused, tokens
from tests.service.engines import wait_until


@pytest.fixture
def sides(pair: tuple[Side, Side]) -> tuple[At, At]:
    """Returns P and D."""
    return At(pair[0]), At(pair[1])


def test_a_request_that_was_prefilled_elsewhere_gets_its_kv_by_pull(sides: tuple[At, At]) -> None:
    p, d = sides
    grant = p.prefilled(give())
    assert not d.scheduler.arrived(ScheduledRequest(R, PROMPT, take=Offer(grant))).one_token
    assert d.load() == 40
    assert d.told(LoadEnded) == LoadEnded(R, 40, None, (), OnLoss.FAIL)
    assert same(p, d)
    assert p.told(SendEnded) == SendEnded(R, None)
    d.scheduler.finished(R, PROMPT, TARGET, 40, COMPLETE)
    assert (len(p.scheduler.policy), len(d.scheduler.policy)) == (0, 0)


@pytest.mark.parametrize("labelled", [True, False])
def test_a_request_with_a_long_id_gets_its_kv_and_blocks_are_sought_for_it(
    sides: tuple[At, At], labelled: bool
) -> None:
    (p, d), long = sides, "r" * 300
    label: dict[str, Any] = {"label": long} if labelled else {}
    d.scheduler.arrived(ScheduledRequest(long, PROMPT, take=Offer(p.prefilled(give(**label))), **label))
    d.scheduler.allocated(long, TARGET, 0, d.scheduler.match(long, 0).tokens)
    assert d.told(LoadEnded).loss is None
    assert not p.scheduler.blocks_needed(63, request_id=long).enough


def test_of_a_prompt_that_goes_on_otherwise_the_beginning_comes(sides: tuple[At, At]) -> None:
    p, d = sides
    before = d.side.read(TARGET[0][2:])
    d.scheduler.arrived(ScheduledRequest(R, [*PROMPT[:37], 1, 2, 3, 4], take=Offer(p.prefilled(give()))))
    assert d.load() == 40
    assert d.told(LoadEnded) == LoadEnded(R, 32, None, (), OnLoss.FAIL)
    assert same(p, d, (0, 1))
    assert np.array_equal(d.side.read(TARGET[0][2:]), before), "its block is as it was"
    assert p.told(SendEnded) == SendEnded(R, None)


def test_a_prompt_without_a_unit_in_common_gets_nothing(sides: tuple[At, At]) -> None:
    p, d = sides
    grant = p.prefilled(give())
    d.scheduler.arrived(ScheduledRequest(R, PROMPT[::-1], take=Offer(grant)))
    assert d.told(TakeLost).loss.reason is Reason.CONTENT_MISMATCH
    d.scheduler.finished(R, PROMPT, TARGET, 40, COMPLETE)
    d.scheduler.arrived(ScheduledRequest(R, PROMPT, take=Offer(grant)))
    assert d.load() == 40
    assert d.told(LoadEnded).loss is None, "what is on offer is there for whom it is of"


def test_a_full_hit_lets_the_source_free_its_blocks_at_once(sides: tuple[At, At]) -> None:
    p, d = sides
    d.scheduler.arrived(ScheduledRequest(R, PROMPT, take=Offer(p.prefilled(give()))))
    assert d.load(40) == 0
    d.scheduler.step()
    assert p.told(SendEnded) == SendEnded(R, None)


@pytest.mark.parametrize("known", ["source", "target"])
def test_a_push_is_registered_by_its_destination_or_by_a_call(sides: tuple[At, At], known: str) -> None:
    p, d = sides
    key = new_key()
    source = Source(p.side.engine.address, "P") if known == "source" else Source()
    d.scheduler.arrived(ScheduledRequest(R, PROMPT, transfer_key=key, take=source))
    assert d.load() == 40
    target = b"" if known == "source" else d.told(ReservedAt).grant
    wanted = ScheduledRequest(R, PROMPT, transfer_key=key, give=Give(ModeChoice.PUSH), target=target)
    d.scheduler.step()
    assert p.prefilled(wanted) == b""
    assert d.told(LoadEnded).loss is None
    assert same(p, d)
    assert p.told(SendEnded).loss is None


def test_a_push_goes_while_the_prefill_runs_and_starts_over_when_it_is_preempted(pair: tuple[Side, Side]) -> None:
    p, d = At(pair[0], layer_ranges=((0, 1), (1, 1))), At(pair[1])
    key = new_key()
    d.scheduler.arrived(ScheduledRequest(R, PROMPT, transfer_key=key, take=Source(p.side.engine.address)))
    d.load()
    d.scheduler.step()
    p.scheduler.arrived(ScheduledRequest(R, PROMPT, transfer_key=key, give=Give(ModeChoice.PUSH)))
    p.side.fill([20, 21], seed=8)
    p.scheduler.computed(R, [[20, 21, 22]], 32, step=0)
    p.scheduler.step()
    d.until(lambda: np.array_equal(p.side.read([20, 21]), d.side.read(TARGET[0][:2])))
    p.scheduler.preempted(R)
    p.side.fill([20, 21], seed=9)  # the blocks belong to another request now
    p.scheduler.allocated(R, TABLE, 0, 0)
    p.side.fill(TABLE[0], seed=1)
    assert p.scheduler.finished(R, PROMPT, TABLE, 40, COMPLETE, step=1).handed_over
    p.scheduler.step()
    p.side.ranks[0].layers_done(1, 0, 1)
    assert d.told(Provisional) == Provisional(R, ((0, 1),), 1)
    p.side.ranks[0].step_done(1)
    assert d.told(LoadEnded).loss is None
    assert same(p, d)


def preempted_without_a_slot(p: At, d: At) -> None:
    """Starts a push without void slots, as if all were in use, up to its preemption."""
    key = new_key()
    d.scheduler.arrived(ScheduledRequest(R, PROMPT, transfer_key=key, take=Source(p.side.engine.address)))
    d.load()
    d.scheduler.step()
    p.side.engine._lives.page._free.clear()
    p.scheduler.arrived(ScheduledRequest(R, PROMPT, transfer_key=key, give=Give(ModeChoice.PUSH)))
    p.side.fill([20, 21], seed=8)
    p.scheduler.computed(R, [[20, 21, 22]], 32, step=0)
    p.scheduler.step()
    d.until(lambda: np.array_equal(p.side.read([20, 21]), d.side.read(TARGET[0][:2])))


def test_a_preemption_ends_a_push_whose_blocks_cannot_be_taken_back_at_once(sides: tuple[At, At]) -> None:
    p, d = sides
    preempted_without_a_slot(p, d)
    p.scheduler.preempted(R)
    assert p.side.lead.status().counts.pinned_block_count == 0, "they are somebody else's now"
    p.side.fill([20, 21], seed=9)
    assert d.told(LoadEnded).loss is not None
    p.scheduler.computed(R, TABLE, 32, step=0)
    finished = p.scheduler.finished(R, PROMPT, TABLE, 40, COMPLETE)
    assert (finished.keep, finished.handed_over) == (False, False)
    wait_until(lambda: p.side.lead.at_rest() and d.side.lead.at_rest())


def test_a_preemption_raises_while_blocks_may_still_be_read(tmp_path: Path, leads: Leads, attach: Attach) -> None:
    source = Lead(tmp_path, "S", settings=SETTINGS).wait_ready()
    try:
        p, d = At(attach(source), taken_back_s=0.2), At(attach(leads[1]))
        preempted_without_a_slot(p, d)
        with source.process.stopped():
            for _ in range(2):
                with refused(Reason.DEADLINE, DeadlineExceeded):
                    p.scheduler.preempted(R)
        p.scheduler.taken_back_s = WAIT_S
        p.scheduler.preempted(R)
        assert source.status().counts.pinned_block_count == 0
        assert d.told(LoadEnded).loss is not None
        p.side.close()
    finally:
        source.close()


def test_a_push_of_which_nothing_could_be_said_between_two_leads_keeps_no_blocks() -> None:
    with Engine.launch(pool=layout()) as engine:
        scheduler, wanted = Scheduler(engine), give(ModeChoice.PUSH)
        scheduler.arrived(wanted)
        pidfd = os.pidfd_open(engine.lead_pid)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert ended(pidfd)
        os.close(pidfd)
        scheduler.step()
        with refused(Reason.ENGINE_LOST, Unavailable):
            engine.cancel(b"k" * 16)
        scheduler.computed(R, TABLE, 32, step=0)
        finished = scheduler.finished(R, PROMPT, TABLE, 40, COMPLETE)
        assert (finished.keep, finished.handed_over, len(scheduler.policy)) == (False, False, 0)


def test_history_goes_back_for_the_next_turn_and_the_new_prompt_comes_again(sides: tuple[At, At]) -> None:
    p, d = sides
    d.scheduler.arrived(
        ScheduledRequest(
            R,
            PROMPT,
            transfer_key=new_key(),
            take=Offer(p.prefilled(give())),
            give=Give(ModeChoice.PULL, prefill=False),
        )
    )
    d.load()
    d.told(LoadEnded)
    chat = [*PROMPT, *tokens(8, seed=5)]
    d.side.fill(TARGET[0], seed=3)
    assert d.scheduler.finished(R, chat, TARGET, 48, COMPLETE).handed_over
    d.scheduler.step()
    history, turn = d.scheduler.grant(R), [*chat, *tokens(90, seed=6)]
    p.told(SendEnded)
    p = At(p.side, recompute_threshold_tokens=16)
    p.scheduler.arrived(
        ScheduledRequest("r2", turn, transfer_key=new_key(), take=Offer(history), give=Give(ModeChoice.PULL))
    )
    assert p.scheduler.match("r2", 0).tokens == 48
    table = [[*range(40, 49)]]
    p.scheduler.allocated("r2", table, 0, 48)
    assert p.told(LoadEnded).loss is None
    assert np.array_equal(p.side.read(table[0][:3]), d.side.read(TARGET[0]))
    assert p.scheduler.finished("r2", turn, table, len(turn), COMPLETE).handed_over
    p.scheduler.aborted("r2")
    d.told(SendEnded)
    p.told(SendEnded)


@pytest.mark.parametrize("mode", [ModeChoice.PULL, ModeChoice.PUSH])
def test_decode_gives_what_was_computed_but_not_the_token_sampled_last(sides: tuple[At, At], mode: ModeChoice) -> None:
    p, d = sides
    key, prompt = new_key(), tokens(32)
    if mode is ModeChoice.PUSH:
        d.scheduler.arrived(ScheduledRequest(R, prompt, transfer_key=key, take=Source(p.side.engine.address)))
        assert d.load() == 32
        d.scheduler.step()
    p.scheduler.arrived(ScheduledRequest(R, prompt[:30], transfer_key=key, give=Give(mode, prefill=False)))
    p.side.fill(TABLE[0], seed=1)
    assert p.scheduler.finished(R, [*prompt, 7], [TABLE[0][:2]], 32, COMPLETE).handed_over
    p.scheduler.step()
    if mode is ModeChoice.PULL:
        d.scheduler.arrived(ScheduledRequest(R, prompt, take=Offer(p.scheduler.grant(R))))
        assert d.load() == 32
    assert d.told(LoadEnded).loss is None
    assert same(p, d, (0, 1))


def test_a_decode_engine_pushes_its_answer_to_the_target_that_a_router_brought(sides: tuple[At, At]) -> None:
    p, d = sides
    key, chat = new_key(), tokens(40)
    d.scheduler.arrived(ScheduledRequest(R, chat, transfer_key=key, take=Source()))
    assert d.load() == 40
    target, back = d.told(ReservedAt).grant, Give(ModeChoice.PUSH, prefill=False)
    p.scheduler.arrived(ScheduledRequest(R, chat[:30], transfer_key=key, give=back, target=target))
    p.side.fill(TABLE[0], seed=1)
    assert p.scheduler.finished(R, [*chat, 7], TABLE, 40, COMPLETE).handed_over
    p.scheduler.step()
    assert d.told(LoadEnded).loss is None
    assert same(p, d)


def test_a_push_is_named_without_tokens_that_its_destination_computes(leads: Leads, attach: Attach) -> None:
    p, d = (At(attach(lead), backoff_tokens=1) for lead in leads)
    key, prompt = new_key(), tokens(33)
    d.scheduler.arrived(ScheduledRequest(R, prompt, transfer_key=key, take=Source(p.side.engine.address)))
    assert d.load() == 32
    d.scheduler.step()
    p.scheduler.arrived(
        ScheduledRequest(R, prompt, transfer_key=key, give=Give(ModeChoice.PUSH), needs_all_outputs=True)
    )
    p.side.fill(TABLE[0], seed=1)
    assert p.scheduler.finished(R, prompt, TABLE, 33, COMPLETE).handed_over
    p.scheduler.step()
    assert d.told(LoadEnded).loss is None
    assert same(p, d, (0, 1))


WINDOW = replace(layout().groups[0], kind=GroupKind.SLIDING_WINDOW, window_tokens=20)
STATE = replace(layout().groups[0], kind=GroupKind.STATE)
Case = tuple[Group, list[int], tuple[int, ...]]
"""A group, the blocks that its engine gives, and the positions of the blocks that move."""


@pytest.mark.parametrize("mode", ModeChoice)
@pytest.mark.parametrize("case", [(WINDOW, [DROPPED, 2, 9], (1, 2)), (STATE, [1, 2, 9], (2,))], ids=["window", "state"])
def test_windows_send_last_blocks_and_states_running_ones(
    leads: Leads, attach: Attach, mode: ModeChoice, case: Case
) -> None:
    kind, given, goes = case
    pool = uniform_layout(kind, LAYER_BYTES)
    p, d = (At(attach(lead, pool=pool), backoff_tokens=1) for lead in leads)
    key = new_key()
    take: Offer | Source = Source(p.side.engine.address)
    stay = [id_ for i, id_ in enumerate(TARGET[0]) if i not in goes]
    before = d.side.fill(stay, seed=7)
    if mode is ModeChoice.PUSH:
        d.scheduler.arrived(ScheduledRequest(R, PROMPT, transfer_key=key, take=take))
        assert d.load() == 39
        d.scheduler.step()
    p.scheduler.arrived(ScheduledRequest(R, PROMPT, transfer_key=key, give=Give(mode)))
    p.side.fill([1, 2, 9], seed=1)
    p.scheduler.computed(R, [given], 39, 0)
    assert p.scheduler.finished(R, PROMPT, [given], 39, COMPLETE).handed_over
    p.scheduler.step()
    if mode is not ModeChoice.PUSH:
        take = Offer(p.scheduler.grant(R)) if mode is ModeChoice.PULL else take
        d.scheduler.arrived(ScheduledRequest(R, PROMPT, transfer_key=key, take=take))
        assert d.load() == 39
        d.scheduler.step()
    assert d.told(LoadEnded).loss is None
    assert same(p, d, goes)
    assert np.array_equal(d.side.read(stay), before)


def test_a_scheduler_that_lacks_blocks_gets_those_that_nobody_came_for(sides: tuple[At, At]) -> None:
    p, d = sides
    grant = p.prefilled(replace(give(), firm_ttl_s=0.0))
    assert p.scheduler.blocks_needed(3).enough
    ended = p.told(SendEnded)
    assert (ended.request_id, ended.loss.reason) == (R, Reason.LEASE_RECLAIMED)
    d.scheduler.arrived(ScheduledRequest(R, PROMPT, take=Offer(grant)))
    d.load()
    assert d.told(LoadEnded).loss.reason is Reason.LEASE_RECLAIMED


def test_an_offer_for_the_next_turn_is_soft_from_the_start(sides: tuple[At, At]) -> None:
    p, _ = sides
    p.prefilled(replace(give(), give=Give(ModeChoice.PULL, prefill=False)))
    assert p.scheduler.blocks_needed(3).enough
