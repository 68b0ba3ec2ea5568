"""Received KV is in the device before the transfer has succeeded."""

import numpy as np
from numpy.typing import NDArray

from kvgrpc.engine import BlocksReturned, Failed, HandOver, LayersReceived, Pull, Received, content
from kvgrpc.errors import Reason
from tests.engine.conftest import Leads
from tests.engine.made import LAYERS
from tests.engine.mirrored.fake_device import CopyFailed
from tests.engine.mirrored.sides import MirroredSide, MirroredWorkers, check_not_at_rest
from tests.engine.support import QUIET_S, Asked, Side, failure, kinds, new_key, received, tokens

PROMPT = tokens(40)
SOURCE, TARGET = [1, 2, 9], [30, 31, 5]
BYTES = len(SOURCE) * 2048


def pulling(giver: Side, destination: MirroredSide, seed: int = 1) -> tuple[NDArray[np.uint8], HandOver, Pull]:
    """Returns the expected bytes and both ends of a pull that has its blocks."""
    made = giver.fill(SOURCE, seed)
    handover = giver.hand_over(SOURCE, PROMPT)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    destination.engine.flush()
    return made, handover, pull


def test_a_pull_has_not_succeeded_before_the_copies_are_done(giver: Side, destination: MirroredSide) -> None:
    destination.device.hold("in")
    before = destination.device.fill(TARGET, seed=9)
    made, handover, pull = pulling(giver, destination)
    destination.device.wait_started("in")
    assert destination.engine.poll(QUIET_S) == []
    assert np.array_equal(destination.read(TARGET), before)
    destination.device.let_go("in")
    received(destination.finish(pull))
    giver.finish(handover)
    assert np.array_equal(destination.read(TARGET), made)
    assert destination.device.copied == {"in": BYTES}


def test_no_other_block_of_the_device_is_written(giver: Side, destination: MirroredSide) -> None:
    others = [block for block in range(64) if block not in TARGET]
    before = destination.device.fill(others, seed=10)
    _, _, pull = pulling(giver, destination)
    received(destination.finish(pull))
    assert np.array_equal(destination.read(others), before)


def test_a_push_lands_layer_by_layer_in_the_device(giver: Side, destination: MirroredSide) -> None:
    made = giver.fill(SOURCE, seed=2)
    key = new_key()
    reservation = destination.engine.reserve(TARGET, content(PROMPT), transfer_key=key)
    destination.poll_until(bool)
    push = giver.engine.push(content(PROMPT), transfer_key=key)
    push.register(reservation.grant)
    for layer in range(LAYERS):
        destination.device.hold("in")
        push.finished(SOURCE, layers=(layer, 1), last=layer == LAYERS - 1)
        giver.engine.flush()
        destination.device.wait_started("in")
        assert destination.engine.poll(QUIET_S) == []
        destination.device.let_go("in")
        (event,) = destination.poll_until(bool)
        assert isinstance(event, Received if layer == LAYERS - 1 else LayersReceived)
        assert np.array_equal(destination.read(TARGET)[: layer + 1], made[: layer + 1])
    assert reservation.over
    assert kinds(giver.poll_until(lambda _: push.over)) == ["BlocksReturned"]


def test_a_copy_that_fails_fails_the_transfer_and_returns_the_blocks(giver: Side, destination: MirroredSide) -> None:
    destination.device.errors["in"] = CopyFailed("the bus is on fire")
    _, _, pull = pulling(giver, destination)
    told = failure(destination.finish(pull))
    assert (told.reason, told.rank, told.message) == (Reason.DATA_PATH_FAILED, 0, "the bus is on fire")
    del destination.device.errors["in"]
    made, _, again = pulling(giver, destination, seed=3)
    received(destination.finish(again))
    assert np.array_equal(destination.read(TARGET), made)


def test_blocks_of_a_copy_that_was_lost_stay_in_quarantine(giver: Side, destination: MirroredSide) -> None:
    destination.device.errors["in"] = RuntimeError("an illegal memory access was encountered")
    _, _, pull = pulling(giver, destination)
    (event,) = destination.poll_until(bool)
    assert isinstance(event, Failed)
    assert event.reason is Reason.DATA_PATH_FAILED
    assert destination.engine.poll(QUIET_S) == []
    assert destination.lead.status().counts.quarantined_block_count == len(TARGET)
    assert not pull.over
    check_not_at_rest(destination)


def test_a_cancel_returns_the_blocks_when_the_copies_have_ended(giver: Side, destination: MirroredSide) -> None:
    destination.device.hold("in")
    _, _, pull = pulling(giver, destination)
    destination.device.wait_started("in")
    pull.cancel()
    events = destination.poll_until(bool)
    assert kinds(events) == ["Failed"]
    assert destination.engine.poll(QUIET_S) == []
    assert destination.lead.status().counts.quarantined_block_count == len(TARGET)
    destination.device.let_go("in")
    assert destination.poll_until(bool) == [BlocksReturned(pull)]
    assert destination.lead.at_rest()


def test_nothing_comes_into_a_mirror_over_which_an_old_copy_still_goes(giver: Side, destination: MirroredSide) -> None:
    device = destination.device
    device.fill(TARGET, seed=11)
    device.hold("out")
    old = destination.hand_over(TARGET, tokens(40, seed=1))
    device.wait_started("out")
    assert old.take_back()
    destination.finish(old)
    made, _, pull = pulling(giver, destination)
    assert destination.engine.poll(QUIET_S) == []
    assert device.copied == {}
    device.let_go("out")
    received(destination.finish(pull))
    assert np.array_equal(destination.read(TARGET), made)


def test_the_next_turn_is_read_from_the_engine_that_received(giver: Side, destination: MirroredSide) -> None:
    _, handover, pull = pulling(giver, destination)
    received(destination.finish(pull))
    more = [40, 41]
    answer = destination.device.fill(more, seed=12)
    longer = tokens(40 + 32)
    offer = destination.hand_over([*TARGET, *more], longer)
    giver.finish(handover)
    back = giver.engine.pull(offer.grant, content(longer))
    back.start([50, 51, 52, 53, 54])
    received(giver.finish(back))
    assert np.array_equal(giver.read([50, 51, 52]), destination.read(TARGET))
    assert np.array_equal(giver.read([53, 54]), answer)


def test_devices_in_processes_of_two_ranks_exchange_over_every_data_path(
    leads: Leads, device_workers: list[Asked]
) -> None:
    for seed, path in enumerate(("shm", "cma", "nixl")):
        source = MirroredWorkers(leads[0], device_workers[:2], path)
        there = MirroredWorkers(leads[1], device_workers[2:], path)
        try:
            made = source.fill_all(SOURCE, seed=10 * seed)
            handover = source.hand_over(SOURCE, PROMPT)
            pull = there.engine.pull(handover.grant, content(PROMPT))
            pull.start(TARGET)
            received(there.finish(pull))
            source.finish(handover)
            assert there.read_all(TARGET) == made
            moved = there.lead.transfer(pull.transfer_id)
            assert {row.data_path for row in moved.paths}, moved
        finally:
            source.close()
            there.close()
