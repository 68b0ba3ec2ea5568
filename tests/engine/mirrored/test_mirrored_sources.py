"""Blocks of an engine with a device are read only after they were copied into its mirror."""

import numpy as np
import pytest

from kvgrpc.engine import LayersReceived, Received, content
from kvgrpc.errors import Reason
from tests.engine.made import LAYERS, made_bytes
from tests.engine.mirrored.fake_device import CopyFailed
from tests.engine.mirrored.sides import MirroredSide, check_not_at_rest
from tests.engine.support import QUIET_S, Side, failure, kinds, new_key, received, tokens
from tests.service.engines import wait_until

PROMPT = tokens(40)
SOURCE, TARGET = [1, 2, 9], [30, 31, 5]
BYTES = len(SOURCE) * 2048


def test_a_pull_brings_the_bytes_of_the_device(source: MirroredSide, reader: Side) -> None:
    made = source.fill(SOURCE, seed=1)
    handover = source.hand_over(SOURCE, PROMPT)
    pull = reader.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    received(reader.finish(pull))
    source.finish(handover)
    assert np.array_equal(reader.read(TARGET), made)
    assert source.device.copied == {"out": BYTES}


def test_nothing_is_read_before_the_copies_are_done(source: MirroredSide, reader: Side) -> None:
    source.fill(SOURCE, seed=1)
    before = source.hand_over(SOURCE, PROMPT)
    source.device.wait_started("out")
    assert before.take_back()
    source.finish(before)
    wait_until(lambda: source.device.copied == {"out": BYTES})  # else this copy would be held, too
    made = source.fill(SOURCE, seed=2)
    source.device.hold("out")
    handover = source.hand_over(SOURCE, PROMPT)
    pull = reader.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    source.device.wait_started("out")
    assert reader.engine.poll(QUIET_S) == []
    source.device.let_go("out")
    received(reader.finish(pull))
    assert np.array_equal(reader.read(TARGET), made)
    assert source.device.copied == {"out": 2 * BYTES}


def test_copies_begin_once_the_step_that_writes_is_done(source: MirroredSide, reader: Side) -> None:
    source.device.hold("out")
    handover = source.hand_over(SOURCE, PROMPT, after_step=3)
    pull = reader.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    source.ranks[0].step_done(2)
    assert reader.engine.poll(QUIET_S) == []
    assert not source.device.started("out")
    made = source.fill(SOURCE, seed=3)
    source.ranks[0].step_done(3)
    source.device.wait_started("out")
    assert not source.device.copied
    source.device.let_go("out")
    received(reader.finish(pull))
    assert np.array_equal(reader.read(TARGET), made)
    assert source.device.copied == {"out": BYTES}


def test_a_copy_that_fails_fails_both_sides_with_its_reason(source: MirroredSide, reader: Side) -> None:
    source.device.errors["out"] = CopyFailed("the bus is on fire")
    source.device.hold("out")
    handover = source.hand_over(SOURCE, PROMPT)
    pull = reader.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    source.device.wait_started("out")
    source.device.let_go("out")
    told = failure(reader.finish(pull))
    assert (told.reason, "the bus is on fire" in told.message) == (Reason.SOURCE_FAILED, True)
    mine = failure(source.finish(handover))
    assert (mine.reason, mine.rank) == (Reason.SOURCE_FAILED, 0)
    assert not source.device.copied


def test_an_engine_goes_on_after_a_copy_that_failed(source: MirroredSide, reader: Side) -> None:
    source.device.errors["out"] = CopyFailed("once")
    source.finish(source.hand_over(SOURCE, PROMPT))
    del source.device.errors["out"]
    test_a_pull_brings_the_bytes_of_the_device(source, reader)


def test_after_a_copy_that_was_lost_nothing_more_is_handed_over(source: MirroredSide) -> None:
    source.device.errors["out"] = RuntimeError("an illegal memory access was encountered")
    source.finish(source.hand_over(SOURCE, PROMPT))
    del source.device.errors["out"]
    told = failure(source.finish(source.hand_over([20], tokens(16))))
    assert (told.reason, "lost a copy" in told.message) == (Reason.SOURCE_FAILED, True)
    assert not source.device.copied
    check_not_at_rest(source)


def test_a_push_announces_each_layer_once_it_is_copied(source: MirroredSide, reader: Side) -> None:
    made = made_bytes(SOURCE, 4)
    key = new_key()
    reservation = reader.engine.reserve(TARGET, content(PROMPT), transfer_key=key)
    reader.poll_until(bool)
    push = source.engine.push(content(PROMPT), transfer_key=key)
    push.register(reservation.grant)
    for layer in range(LAYERS):
        source.device.hold("out")
        push.finished(SOURCE, layers=(layer, 1), last=layer == LAYERS - 1, after_step=1)
        source.engine.flush()
        source.device.fill_layer(layer, SOURCE, made[layer])
        source.ranks[0].layers_done(1, layer, 1)
        source.device.wait_started("out")
        assert reader.engine.poll(QUIET_S) == []
        source.device.let_go("out")
        if layer < LAYERS - 1:
            (event,) = reader.poll_until(bool)
            assert isinstance(event, LayersReceived)
            assert event.layers_done == ((0, layer + 1),)
    events = reader.poll_until(lambda _: reservation.over)
    assert events[-1] == Received(reservation, 40)
    assert np.array_equal(reader.read(TARGET), made)
    assert kinds(source.poll_until(lambda _: push.over)) == ["BlocksReturned"]
    assert source.device.copied == {"out": BYTES}


def test_blocks_that_were_handed_over_before_are_copied_again(source: MirroredSide, reader: Side) -> None:
    for seed in (5, 6):
        made = source.fill(SOURCE, seed)
        handover = source.hand_over(SOURCE, PROMPT)
        pull = reader.engine.pull(handover.grant, content(PROMPT))
        pull.start(TARGET)
        received(reader.finish(pull))
        source.finish(handover)
        assert np.array_equal(reader.read(TARGET), made)
    assert source.device.copied == {"out": 2 * BYTES}


def test_blocks_come_back_though_a_copy_of_them_goes_on(source: MirroredSide, reader: Side) -> None:
    """A late copy is overwritten by the next one."""
    source.device.hold("out")
    source.fill(SOURCE, seed=7)
    first = source.hand_over(SOURCE, PROMPT)
    source.device.wait_started("out")
    assert first.take_back()
    source.finish(first)
    made = source.fill(SOURCE, seed=8)
    second = source.hand_over(SOURCE, PROMPT)
    pull = reader.engine.pull(second.grant, content(PROMPT))
    pull.start(TARGET)
    source.device.let_go("out")
    received(reader.finish(pull))
    assert np.array_equal(reader.read(TARGET), made)
    assert source.device.copied == {"out": 2 * BYTES}


@pytest.mark.parametrize("after_step", [0, 5])
def test_a_hand_over_that_ends_before_it_is_copied_leaves_nothing(
    source: MirroredSide, reader: Side, after_step: int
) -> None:
    source.device.hold("out")
    handover = source.hand_over(SOURCE, PROMPT, after_step=after_step)
    source.round_trip()
    handover.cancel()
    source.finish(handover)
    source.device.let_go("out")
    assert source.lead.at_rest()
    source.ranks[0].step_done(5)
    next_one = source.hand_over(SOURCE, PROMPT)
    pull = reader.engine.pull(next_one.grant, content(PROMPT))
    pull.start(TARGET)
    received(reader.finish(pull))
    begun = 0 if after_step else BYTES
    assert source.device.copied == {"out": begun + BYTES}, "what was not begun is not copied"
