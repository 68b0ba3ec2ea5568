"""Pushes as engines see them: parts as they are computed, layers before the end, and whose the blocks are."""

import numpy as np
import pytest

from kvgrpc.core.grants import from_json
from kvgrpc.engine import (
    BlocksReturned,
    Failed,
    LayersReceived,
    Push,
    Received,
    Reservation,
    Reserved,
    content,
)
from kvgrpc.errors import InvalidRequest, PreconditionFailed, Reason
from tests.engine.made import LAYERS
from tests.engine.support import Side, kinds, new_key, tokens

PROMPT = tokens(40)
SOURCE, TARGET = [1, 2, 9], [30, 31, 5]
Pair = tuple[Side, Side]


def reserved(destination: Side, key: bytes) -> Reservation:
    """Blocks for a push of the prompt, and the grant for them."""
    reservation = destination.engine.reserve(TARGET, content(PROMPT), transfer_key=key, request_id="r-1")
    with pytest.raises(PreconditionFailed):
        _ = reservation.kv_transfer_params
    assert destination.poll_until(bool) == [Reserved(reservation)]
    assert from_json(reservation.kv_transfer_params) == reservation.grant
    return reservation


def begun(pair: Pair) -> tuple[Push, Reservation]:
    """A push whose two sides know each other."""
    source, destination = pair
    key = new_key()
    reservation = reserved(destination, key)
    push = source.engine.push(content(PROMPT), transfer_key=key, request_id="r-1")
    push.register(reservation.grant)
    return push, reservation


def test_received_hands_the_destination_its_blocks_and_the_bytes_are_exact(pair: Pair) -> None:
    source, destination = pair
    made = source.fill(SOURCE, seed=1)
    push, reservation = begun(pair)
    push.finished(SOURCE, last=True)
    source.engine.flush()
    events = destination.poll_until(lambda _: reservation.over)
    assert events[-1] == Received(reservation, 40)
    assert source.poll_until(lambda _: push.over) == [BlocksReturned(push)]
    assert np.array_equal(destination.read(TARGET), made)


def test_layers_are_told_as_they_come_and_the_end_comes_once(pair: Pair) -> None:
    source, destination = pair
    made = source.fill(SOURCE, seed=2)
    push, reservation = begun(pair)
    done: list[tuple[tuple[int, int], ...]] = []
    for layer in range(LAYERS):
        push.finished(SOURCE, layers=(layer, 1), last=layer == LAYERS - 1)
        source.engine.flush()
        if layer < LAYERS - 1:
            events = destination.poll_until(bool)
            done += [event.layers_done for event in events if isinstance(event, LayersReceived)]
    events = destination.poll_until(lambda _: reservation.over)
    assert events[-1] == Received(reservation, 40)
    assert done == [((0, layer + 1),) for layer in range(LAYERS - 1)]
    assert np.array_equal(destination.read(TARGET), made)
    assert kinds(source.poll_until(lambda _: push.over)) == ["BlocksReturned"]


def test_a_source_that_cannot_deliver_fails_the_destination_at_once(pair: Pair) -> None:
    source, destination = pair
    push, reservation = begun(pair)
    push.finished(SOURCE[:2])
    push.fail("the prefill was aborted")
    source.engine.flush()
    events = destination.poll_until(lambda _: reservation.over)
    (failed,) = (event for event in events if isinstance(event, Failed))
    assert (failed.transfer, failed.reason) == (reservation, Reason.SOURCE_FAILED)
    assert "the prefill was aborted" in failed.message
    assert events[-1] == BlocksReturned(reservation)
    assert source.poll_until(lambda _: push.over)[-1] == BlocksReturned(push)


def test_cancelling_a_reservation_ends_the_push_on_both_sides(pair: Pair) -> None:
    source, destination = pair
    push, reservation = begun(pair)
    push.finished(SOURCE[:2])
    source.engine.flush()
    reservation.cancel("the user left")
    assert kinds(destination.poll_until(lambda _: reservation.over))[-2:] == ["Failed", "BlocksReturned"]
    assert kinds(source.poll_until(lambda _: push.over))[-2:] == ["Failed", "BlocksReturned"]


def test_a_part_that_is_refused_ends_the_push(pair: Pair) -> None:
    source, destination = pair
    push, reservation = begun(pair)
    push.finished(SOURCE[:1])
    push.finished([10_000])
    events = source.poll_until(lambda _: push.over)
    (failed,) = (event for event in events if isinstance(event, Failed))
    assert failed.reason is Reason.BLOCK_OUT_OF_RANGE
    assert kinds(destination.poll_until(lambda _: reservation.over))[-2:] == ["Failed", "BlocksReturned"]
    with pytest.raises(PreconditionFailed):
        push.finished(SOURCE[1:])


def test_what_can_be_seen_to_be_wrong_is_refused_here(pair: Pair) -> None:
    source, _ = pair
    with pytest.raises(InvalidRequest):
        source.engine.push(content(PROMPT), transfer_key=b"short")
    with pytest.raises(InvalidRequest):
        source.engine.reserve(TARGET, content(PROMPT), transfer_key=b"short")
    push = source.engine.push(content(PROMPT), transfer_key=new_key())
    with pytest.raises(InvalidRequest):
        push.register(b"no grant")
