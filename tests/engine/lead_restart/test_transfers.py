"""Transfers in flight when a lead dies fail once and come back, and peers use nothing that they read of them."""

import numpy as np
import pytest

from kvgrpc.engine import BlocksReturned, Failed, LayersReceived, PullOpened, Reserved, content
from kvgrpc.errors import PreconditionFailed, Reason, Unavailable
from tests.engine.lead_restart.sides import (
    PROMPT,
    SOURCE,
    TARGET,
    Side,
    Sides,
    begun,
    check_serves,
    kill,
    replaced,
    slow,
)
from tests.engine.support import new_key, refused
from tests.service.conftest import TEST_S
from tests.service.engines import wait_until

pytestmark = pytest.mark.timeout(TEST_S)


@pytest.mark.parametrize("mode", ["shm", "cma", slow("nixl")])
def test_hand_overs_fail_and_come_back_also_those_never_sent(sides: Sides, peer: Side, mode: str) -> None:
    side = sides(mode)
    made = side.fill(SOURCE, seed=2)
    known = side.engine.finished_blocks(SOURCE, content(PROMPT), transfer_key=new_key())
    offer = peer.engine.finished_blocks(SOURCE, content(PROMPT), transfer_key=new_key())
    peer.engine.flush()
    pull = side.engine.pull(offer.grant, content(PROMPT))
    side.until(lambda events: any(isinstance(event, PullOpened) for event in events))  # the pull waits for blocks
    unsent = side.engine.finished_blocks([3, 4, 5], content(PROMPT), transfer_key=new_key())
    replaced(side, known, unsent, pull)
    with refused(Reason.TRANSFER_ENDED, PreconditionFailed):
        pull.start(TARGET)
    assert np.array_equal(side.read(SOURCE), made)
    offer.cancel()
    late = peer.engine.pull(known.grant, content(PROMPT))  # the grant's lead is dead
    check_serves(side, peer)
    late.cancel()
    peer.until(lambda _: late.over)


@pytest.mark.parametrize("mode", ["shm", slow("cma"), slow("nixl")])
def test_a_peer_uses_nothing_that_it_read_of_a_dead_lead(sides: Sides, peer: Side, slow_peer: Side, mode: str) -> None:
    side = sides(mode)
    slow_peer.view[:, TARGET] = 0
    side.fill(SOURCE, seed=3)
    handover = side.engine.finished_blocks(SOURCE, content(PROMPT), transfer_key=new_key())
    side.engine.flush()
    pull = slow_peer.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    slow_peer.engine.flush()
    wait_until(lambda: bool(slow_peer.view[:, TARGET].any()))
    replaced(side, handover)
    side.fill(SOURCE, seed=4)  # the blocks are the engine's own again
    check_serves(side, peer)
    events = slow_peer.until(lambda _: pull.over)
    assert [type(event) for event in events if event.transfer is pull][-2:] == [Failed, BlocksReturned]


@pytest.mark.parametrize("mode", ["shm", slow("cma"), slow("nixl")])
def test_reservations_and_pushes_fail_and_come_back(sides: Sides, peer: Side, mode: str) -> None:
    side = sides(mode)
    side.fill(SOURCE, seed=6)
    peer.view[:, TARGET] = 0
    reserved = side.engine.reserve(TARGET, content(PROMPT), transfer_key=new_key())
    never_sent = side.engine.push(content(PROMPT), transfer_key=new_key())
    never_sent.finished([10, 11, 12], last=True)
    between = side.engine.push(content(PROMPT), transfer_key=new_key())
    target = peer.engine.reserve(TARGET, content(PROMPT), transfer_key=between.transfer_key)
    assert Reserved(target) in peer.until(bool)
    between.register(target.grant)
    between.finished(SOURCE[:2])
    side.until(lambda _: bool(between.transfer_id))
    wait_until(lambda: bool(peer.view[1, TARGET[1]].any()))
    events = replaced(side, reserved, never_sent, between)
    assert Reserved(reserved) not in events
    check_serves(side, peer)
    target.cancel()
    peer.until(lambda _: target.over)


@pytest.mark.parametrize("mode", ["shm", slow("cma"), slow("nixl")])
def test_layers_received_before_the_death_are_of_a_failed_push(sides: Sides, peer: Side, mode: str) -> None:
    side = sides(mode)
    push, target = begun(peer, side, TARGET, PROMPT)
    peer.fill(SOURCE, seed=7)
    push.finished(SOURCE, layers=(0, 1))
    peer.engine.flush()
    side.until(lambda events: any(isinstance(event, LayersReceived) for event in events))
    replaced(side, target)
    side.fill(TARGET, seed=8)
    kept = side.read(TARGET)
    check_serves(side, peer)
    assert np.array_equal(side.read(TARGET), kept)


def test_a_first_part_that_no_lead_took_leaves_its_blocks_to_the_engine(sides: Sides, peer: Side) -> None:
    side = sides("shm")
    push, before = side.engine.push(content(PROMPT), transfer_key=new_key()), side.engine.incarnation
    kill(side)
    side.engine.poll()
    with refused(Reason.ENGINE_LOST, Unavailable):
        push.finished(SOURCE, last=True)
    assert push.start_over()
    side.until_it_lives_after(before)
    check_serves(side, peer)
