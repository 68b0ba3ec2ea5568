"""Pushes as engines see them: parts as they are computed, layers before the end, and ownership of blocks."""

from typing import Any

import numpy as np
import pytest

from kvgrpc.core.values.grants import from_json
from kvgrpc.engine import (
    BlocksReturned,
    Failed,
    LayersReceived,
    PartsReturned,
    Push,
    Received,
    Reservation,
    Reserved,
    content,
)
from kvgrpc.engine.transfers.handles import Handle
from kvgrpc.errors import InvalidRequest, PreconditionFailed, Reason
from kvgrpc.session.v1.session_pb2 import Call
from kvgrpc.v1 import lease_pb2
from tests.engine.made import LAYERS
from tests.engine.support import Side, kinds, new_key, tokens
from tests.service.engines import wait_until

PROMPT = tokens(40)
SOURCE, TARGET = [1, 2, 9], [30, 31, 5]
Pair = tuple[Side, Side]


def reserved(destination: Side, key: bytes) -> Reservation:
    """Reserves blocks for a push of the prompt, and waits for the grant."""
    reservation = destination.engine.reserve(TARGET, content(PROMPT), transfer_key=key, request_id="r-1")
    with pytest.raises(PreconditionFailed):
        _ = reservation.kv_transfer_params
    assert destination.poll_until(bool) == [Reserved(reservation)]
    assert from_json(reservation.kv_transfer_params) == reservation.grant
    return reservation


def begun(pair: Pair) -> tuple[Push, Reservation]:
    """Returns both ends of a push after registering its destination."""
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


def test_the_first_part_of_each_prefill_states_the_prompt_and_no_later_one_does(pair: Pair) -> None:
    source, destination = pair
    push, reservation = begun(pair)
    calls, ask = list[Call](), push.ask

    def heard(handle: Handle | None, traceparent: str = "", **request: Any) -> Call:
        calls.append(ask(handle, traceparent, **request))
        return calls[-1]

    push.ask = heard
    push.finished(SOURCE[:1])
    push.finished(SOURCE[1:2])
    push.ask = ask
    assert push.start_over()
    push.ask = heard
    made = source.fill(SOURCE, seed=3)
    for number, block in enumerate(SOURCE):
        push.finished([block], last=number == len(SOURCE) - 1)
    source.engine.flush()
    stated = [call.finished_blocks.part.HasField("content") for call in calls]
    assert stated == [True, False, True, False, False]
    assert destination.poll_until(lambda _: reservation.over)[-1] == Received(reservation, 40)
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


def test_layers_move_when_the_worker_has_written_them_and_not_before(pair: Pair) -> None:
    source, destination = pair
    push, reservation = begun(pair)
    for layer in range(LAYERS):
        push.finished(SOURCE, layers=(layer, 1), last=layer == LAYERS - 1, after_step=7)
    source.engine.flush()
    made = source.fill(SOURCE, seed=4)
    source.ranks[0].layers_done(7, 0, LAYERS - 1)
    everything = ((0, LAYERS - 1),)
    destination.poll_until(
        lambda found: any(isinstance(event, LayersReceived) and event.layers_done == everything for event in found)
    )
    source.ranks[0].step_done(7)
    assert destination.poll_until(lambda _: reservation.over)[-1] == Received(reservation, 40)
    assert np.array_equal(destination.read(TARGET), made)


def test_a_prefill_that_starts_over_has_its_blocks_at_once_and_delivers_the_new_ones(pair: Pair) -> None:
    source, destination = pair
    push, reservation = begun(pair)
    source.fill(SOURCE, seed=5)
    push.finished(SOURCE, layers=(0, 1))
    source.engine.flush()
    destination.poll_until(bool)
    assert push.start_over()
    source.fill(SOURCE, seed=6)
    source.engine.flush()
    again = [20, 21, 22]
    made = source.fill(again, seed=7)
    push.finished(again, last=True)
    source.engine.flush()
    events = destination.poll_until(lambda _: reservation.over)
    assert [event.layers_done for event in events if isinstance(event, LayersReceived)] == [()]
    assert events[-1] == Received(reservation, 40)
    assert np.array_equal(destination.read(TARGET), made)
    assert source.poll_until(lambda _: push.over) == [BlocksReturned(push)], "the first blocks were never returned"


def test_blocks_that_cannot_be_taken_back_at_once_are_returned_when_they_are_replaced(pair: Pair) -> None:
    source, destination = pair
    push, reservation = begun(pair)
    source.engine._lives.page._free.clear()
    push.finished(SOURCE[:2])
    assert not push.start_over()
    again = [20, 21, 22]
    made = source.fill(again, seed=8)
    push.finished(again, last=True)
    assert source.poll_until(lambda _: push.over) == [PartsReturned(push), BlocksReturned(push)]
    destination.poll_until(lambda _: reservation.over)
    assert np.array_equal(destination.read(TARGET), made)


def test_a_push_that_starts_over_and_gives_up_fails_at_both_and_returns_all(pair: Pair) -> None:
    source, destination = pair
    push, reservation = begun(pair)
    push.finished(SOURCE[:2])
    assert push.start_over()
    push.fail("no room for it")
    assert kinds(source.poll_until(lambda _: push.over)) == ["Failed", "BlocksReturned"]
    assert kinds(destination.poll_until(lambda _: reservation.over))[-2:] == ["Failed", "BlocksReturned"]


def test_a_part_that_comes_after_the_end_of_its_push_pins_nothing(pair: Pair) -> None:
    """The engine has not heard of the end when its prefill starts over."""
    source, _ = pair
    push = source.engine.push(content(PROMPT), transfer_key=new_key())
    push.finished(SOURCE[:2])
    source.poll_until(lambda _: bool(push.transfer_id))
    source.lead.api.leases.ReleaseLease(lease_pb2.ReleaseLeaseRequest(lease=lease_pb2.LeaseRef(lease_id=push.lease_id)))
    assert push.start_over()
    push.finished([20, 21, 22], last=True)
    assert kinds(source.poll_until(lambda _: push.over)) == ["Failed", "BlocksReturned"]
    wait_until(source.lead.at_rest, what=source.lead.status)


def test_what_was_read_of_blocks_that_were_taken_back_is_never_received(pair: Pair) -> None:
    """The void flag alone is enough: the lead is told nothing before it settles the read."""
    source, destination = pair
    source.fill(SOURCE, seed=9)
    handover = source.hand_over(SOURCE, PROMPT, after_step=1)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    destination.engine.flush()
    assert source.engine._lives.page.void(handover.lease_id)
    source.fill(SOURCE, seed=10)
    source.ranks[0].step_done(1)
    events = destination.poll_until(lambda _: pull.over)
    (failed,) = (event for event in events if isinstance(event, Failed))
    assert failed.reason is Reason.LEASE_VOIDED
    assert kinds(source.poll_until(lambda _: handover.over)) == ["Failed", "BlocksReturned"]
    assert source.engine._lives.page.take("the next") > 0


def test_a_hand_over_that_is_taken_back_ends_for_its_readers(pair: Pair) -> None:
    source, destination = pair
    source.fill(SOURCE, seed=11)
    handover = source.hand_over(SOURCE, PROMPT)
    source.poll_until(lambda _: bool(handover.transfer_id))
    assert handover.take_back()
    source.fill(SOURCE, seed=12)
    assert kinds(source.poll_until(lambda _: handover.over)) == ["Failed", "BlocksReturned"]
    assert not handover.take_back()
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    events = destination.poll_until(lambda _: pull.over)
    assert [event.reason for event in events if isinstance(event, Failed)] == [Reason.LEASE_VOIDED]
