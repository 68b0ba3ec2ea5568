"""Hand-overs and pulls as an engine sees them: events, their order, and the ownership of blocks."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgrpc.core.values.grants import OnAbort, from_json
from kvgrpc.engine import BlocksReturned, Failed, HandOver, Item, Pull, PullOpened, Received, content
from kvgrpc.engine.session import session
from kvgrpc.errors import InvalidRequest, NextStep, OutOfRange, PreconditionFailed, Reason
from kvgrpc.v1 import transfer_pb2
from tests.engine.conftest import SETTINGS
from tests.engine.made import LAYERS
from tests.engine.support import (
    QUIET_S,
    WAIT_S,
    Lead,
    Side,
    failure,
    kinds,
    new_key,
    readable,
    received,
    refused,
    tokens,
)
from tests.service.engines import wait_until
from tests.service.values import dur

PROMPT = tokens(40)
SOURCE, TARGET = [1, 2, 9], [30, 31, 5]
Pair = tuple[Side, Side]

# Engine actions between a call and the end of its transfer.
MOMENTS: dict[str, Callable[[Side, Pull], object]] = {
    "before it is sent": lambda side, pull: None,
    "before it is answered": lambda side, pull: side.engine.flush(),
    "once it is answered": lambda side, pull: side.known(pull),
    "once it is open": lambda side, pull: side.poll_until(lambda events: kinds(events) == ["PullOpened"]),
}
moments = pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)


def test_received_hands_the_destination_its_blocks_and_the_bytes_are_exact(pair: Pair) -> None:
    source, destination = pair
    made = source.fill(SOURCE, seed=1)
    handover = source.hand_over(SOURCE, PROMPT, request_id="r-1")
    pull = destination.engine.pull(handover.grant, content(PROMPT), request_id="r-1")
    pull.start(TARGET)
    events = destination.finish(pull)
    assert events == [Received(pull, 40)]
    (telemetry,) = (event.telemetry for event in events if isinstance(event, Received))
    assert telemetry is not None
    assert telemetry.nbytes == made.nbytes
    assert 0 < telemetry.descriptors <= LAYERS * len(SOURCE)
    assert 0 < telemetry.post_s <= telemetry.wire_s
    assert source.finish(handover) == [BlocksReturned(handover)]
    assert np.array_equal(destination.read(TARGET), made)
    assert not destination.lead.leases()
    assert source.lead.transfer(handover.transfer_id).request_id == "r-1"


@moments
def test_blocks_may_be_given_at_any_moment(pair: Pair, moment: Callable[[Side, Pull], object]) -> None:
    source, destination = pair
    made = source.fill(SOURCE, seed=2)
    handover = source.hand_over(SOURCE, PROMPT)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    moment(destination, pull)
    pull.start(TARGET)
    received(destination.poll_until(lambda _: pull.over))
    assert np.array_equal(destination.read(TARGET), made)
    assert kinds(source.finish(handover)) == ["BlocksReturned"]


@moments
def test_an_empty_start_releases_the_source_at_any_moment(pair: Pair, moment: Callable[[Side, Pull], object]) -> None:
    source, destination = pair
    handover = source.hand_over(SOURCE, PROMPT)
    before = destination.view().copy()
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    moment(destination, pull)
    pull.start(have_tokens=40)
    received(destination.poll_until(lambda _: pull.over))
    assert kinds(source.finish(handover)) == ["BlocksReturned"]
    assert np.array_equal(destination.view(), before)


@moments
def test_a_cancel_at_any_moment_ends_the_pull_at_both(pair: Pair, moment: Callable[[Side, Pull], object]) -> None:
    source, destination = pair
    handover = source.hand_over(SOURCE, PROMPT)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    moment(destination, pull)
    pull.cancel("the user left")
    failed = failure(destination.poll_until(lambda _: pull.over))
    assert (failed.reason, failed.message, failed.cancelled) == (Reason.CANCELLED, "the user left", True)
    assert failure(source.finish(handover)).reason is Reason.CANCELLED
    pull.cancel()
    destination.round_trip()
    assert destination.engine.poll() == []


def test_a_pull_that_was_started_and_cancelled_ends_once(pair: Pair) -> None:
    source, destination = pair
    for _ in range(5):  # cancel and completion race: either may win, but there is one end
        handover = source.hand_over(SOURCE, PROMPT)
        pull = destination.engine.pull(handover.grant, content(PROMPT))
        pull.start(TARGET)
        pull.cancel()
        events = destination.finish(pull)
        if isinstance(events[-1], Received):
            received(events)
        else:
            assert failure(events).reason is Reason.CANCELLED
        assert kinds(source.finish(handover))[-1] == "BlocksReturned"


def test_a_cancelled_pull_does_not_stand_in_the_way_of_the_next_with_its_grant(pair: Pair) -> None:
    source, destination = pair
    handover = source.hand_over(SOURCE, PROMPT, on_abort=OnAbort.KEEP)
    first = destination.engine.pull(handover.grant, content(PROMPT))
    first.cancel()
    failure(destination.finish(first))
    second = destination.engine.pull(handover.grant, content(PROMPT))
    second.start(TARGET)
    received(destination.finish(second))


def test_the_source_may_take_its_hand_over_back(pair: Pair) -> None:
    source, destination = pair
    handover = source.engine.finished_blocks(SOURCE, content(PROMPT), transfer_key=new_key())
    handover.cancel("preempted")
    assert failure(source.finish(handover)).reason is Reason.CANCELLED
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    assert failure(destination.finish(pull)).reason is Reason.CANCELLED


def test_a_lease_that_runs_out_is_one_failed_and_one_blocks_returned(pair: Pair) -> None:
    source, _ = pair
    handover = source.hand_over(SOURCE, PROMPT, ttl_s=0.1)
    assert failure(source.finish(handover)).reason is Reason.LEASE_EXPIRED


def test_a_pull_may_come_before_the_hand_over_is_announced(pair: Pair) -> None:
    source, destination = pair
    made = source.fill(SOURCE, seed=3)
    handover = source.engine.finished_blocks(SOURCE, content(PROMPT), transfer_key=new_key())
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    destination.lead.wait_for(destination.known(pull), "access")
    assert destination.engine.poll(QUIET_S) == []
    source.engine.flush()
    received(destination.finish(pull))
    assert np.array_equal(destination.read(TARGET), made)


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        ([1, 2, 64], Reason.BLOCK_OUT_OF_RANGE),
        ([1, 2, 2], Reason.BLOCK_DUPLICATE),
        ([1, 2], Reason.CONTENT_RANGE),
        # Refused before the lead's node sees it.
        (list(range(70_000)), Reason.LIMIT_EXCEEDED),
    ],
)
def test_a_refused_hand_over_fails_and_returns_its_blocks(pair: Pair, blocks: list[int], reason: Reason) -> None:
    source, destination = pair
    handover = source.engine.finished_blocks(blocks, content(PROMPT), transfer_key=new_key())
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    destination.lead.wait_for(destination.known(pull), "access")
    source.engine.flush()
    assert failure(source.finish(handover)).reason is reason
    assert failure(destination.finish(pull)).reason is Reason.LEASE_REFUSED


def test_what_is_no_hand_over_raises_and_nothing_was_asked(pair: Pair) -> None:
    source, _ = pair
    for blocks, kind in (([-1, 2], InvalidRequest), ([1.5], InvalidRequest), (range(1 << 23), OutOfRange)):
        with pytest.raises(kind):
            source.hand_over(blocks, PROMPT)  # type: ignore[arg-type]
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        source.hand_over(SOURCE, PROMPT, transfer_key=b"short")
    with refused(Reason.TTL_INVALID, InvalidRequest):
        source.hand_over(SOURCE, PROMPT, ttl_s=0.0)
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        content([1, -1])
    with refused(Reason.GRANT_INVALID, InvalidRequest):
        source.engine.pull(b"no grant", content(PROMPT))
    source.round_trip()
    assert not source.lead.leases()


@pytest.mark.parametrize(
    "more", [{"token_ids": np.array(PROMPT)}, {"items": [Item(b"i", 0, 1)]}, {"adapter": "a"}, {"cache_salt": "s"}]
)
def test_an_opaque_id_stands_alone_nothing_beside_it_is_dropped(more: dict[str, Any]) -> None:
    assert content(opaque_id=b"o", tokens=40).tokens == 40
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        content(opaque_id=b"o", tokens=40, **more)


def test_blocks_that_do_not_fit_end_the_pull_and_release_the_source(pair: Pair) -> None:
    source, destination = pair
    handover = source.hand_over(SOURCE, PROMPT)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    destination.known(pull)
    pull.start([1])
    assert failure(destination.finish(pull)).reason is Reason.BLOCK_COUNT_MISMATCH
    assert failure(source.finish(handover)).reason is Reason.CANCELLED


def test_blocks_given_to_a_pull_that_has_just_failed_come_back_once(pair: Pair) -> None:
    source, destination = pair
    handover = source.hand_over(SOURCE, PROMPT)
    pull = destination.engine.pull(handover.grant, content(tokens(40, seed=1)))
    wanted = transfer_pb2.WaitTransferRequest(
        transfer_id=destination.known(pull), until=transfer_pb2.WAIT_CONDITION_RETURNED, timeout=dur(5.0)
    )
    destination.lead.api.transfers.WaitTransfer(wanted)  # the pull has ended, but the engine has not polled
    pull.start(TARGET)
    assert failure(destination.finish(pull)).reason is Reason.CONTENT_MISMATCH
    destination.round_trip()
    assert destination.engine.poll() == []
    assert source.engine.poll() == []


def test_a_pull_gets_its_blocks_once(pair: Pair) -> None:
    source, destination = pair
    handover = source.hand_over(SOURCE, PROMPT)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    with refused(Reason.TRANSFER_EXISTS, PreconditionFailed):
        pull.start(TARGET)
    received(destination.finish(pull))
    with refused(Reason.TRANSFER_ENDED, PreconditionFailed):
        pull.start(TARGET)


def test_a_prompt_is_taken_with_the_items_that_stand_at_its_placeholders_only(pair: Pair) -> None:
    """An engine that takes only a part may name items beyond that part; they do not matter."""
    source, destination = pair
    cat, later = Item(b"cat", offset=2, length=9), Item(b"bird", offset=32, length=4)
    handover = source.engine.finished_blocks(SOURCE, content(PROMPT, items=[cat, later]), transfer_key=new_key())
    source.engine.flush()
    for item in (Item(b"dog", offset=2, length=9), Item(b"cat", offset=3, length=9)):
        pull = destination.engine.pull(handover.grant, content(PROMPT, items=[item, later]))
        pull.start(TARGET)
        assert failure(destination.finish(pull)).reason is Reason.CONTENT_MISMATCH
    pull = destination.engine.pull(handover.grant, content(PROMPT[:32], items=[later, cat]), use_tokens=32)
    pull.start(TARGET[:2])
    received(destination.finish(pull))


def test_swapped_grants_give_no_request_the_kv_of_another(pair: Pair) -> None:
    source, destination = pair
    other, key = tokens(40, seed=1), new_key()
    handover = source.hand_over(SOURCE, PROMPT, transfer_key=key)
    for expected_key, reason in ((key, Reason.CONTENT_MISMATCH), (new_key(), Reason.TRANSFER_KEY_MISMATCH)):
        before = destination.view().copy()
        pull = destination.engine.pull(handover.grant, content(other), transfer_key=expected_key)
        pull.start(TARGET)
        failed = failure(destination.finish(pull))
        assert failed.reason is reason
        if reason is Reason.CONTENT_MISMATCH:
            assert failed.next is NextStep.FIX_REQUEST
        assert np.array_equal(destination.view(), before)


def test_a_prefix_that_is_held_already_is_not_moved(pair: Pair) -> None:
    source, destination = pair
    made = source.fill(SOURCE, seed=4)
    before = destination.view().copy()
    handover = source.hand_over(SOURCE, PROMPT)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET[1:], have_tokens=16)
    received(destination.finish(pull))
    assert np.array_equal(destination.read(TARGET[1:]), made[:, 1:])
    before[:, TARGET[1:]] = made[:, 1:]
    assert np.array_equal(destination.view(), before)


@pytest.mark.parametrize(
    ("own_tokens", "use_tokens", "usable"), [(56, 0, 40), (30, 0, 16), (40, 32, 32)], ids=["longer", "shorter", "asked"]
)
def test_a_pull_says_first_how_many_tokens_it_gets(pair: Pair, own_tokens: int, use_tokens: int, usable: int) -> None:
    source, destination = pair
    handover = source.hand_over(SOURCE, PROMPT)
    pull = destination.engine.pull(handover.grant, content(tokens(own_tokens)), use_tokens=use_tokens)
    assert pull.use_tokens == usable
    events = destination.poll_until(bool)
    pull.start(TARGET[: -(-usable // 16)])
    assert events + destination.finish(pull) == [PullOpened(pull, usable), Received(pull, usable)]


def test_numpy_block_ids_will_do(pair: Pair) -> None:
    source, destination = pair
    made = source.fill(SOURCE, seed=5)
    handover = source.hand_over(np.array(SOURCE, dtype=np.int32), PROMPT)  # type: ignore[arg-type]
    pull = destination.engine.pull(handover.grant, content(np.array(PROMPT)))  # type: ignore[arg-type]
    pull.start([np.array(TARGET).tolist()])
    received(destination.finish(pull))
    assert np.array_equal(destination.read(TARGET), made)


@pytest.fixture
def forgetful(tmp_path: Path) -> Iterator[Side]:
    """Yields an engine whose lead remembers one acknowledged transfer. The next acknowledged one replaces it."""
    lead = Lead(tmp_path, "P", settings=f"{SETTINGS}transfer_history = 1\n")
    try:
        with closing(Side(lead.wait_ready())) as side:
            yield side
    finally:
        lead.close()


def ended(side: Side, count: int) -> list[str]:
    """Makes hand-overs that expire one after the other. Returns their ids."""
    made: list[HandOver] = []
    for _ in range(count):
        made.append(side.hand_over(SOURCE, PROMPT, ttl_s=0.1))
        side.finish(made[-1])
    return [handover.transfer_id for handover in made]


def test_events_that_poll_returned_are_acknowledged_by_the_next_poll(forgetful: Side) -> None:
    first, second, third = ended(forgetful, 3)
    assert [forgetful.lead.knows(one) for one in (first, second, third)] == [False, True, True]
    assert forgetful.engine.poll() == []  # poll acknowledges even without other calls
    forgetful.round_trip()
    assert [forgetful.lead.knows(one) for one in (second, third)] == [False, True]


def test_an_engine_that_read_many_events_says_so_by_itself(forgetful: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "UNSAID_MAX", 2)
    first, second = ended(forgetful, 2)
    assert not forgetful.engine.poll()
    wait_until(lambda: not forgetful.lead.knows(first))
    assert forgetful.lead.knows(second)


def test_poll_waits_for_an_event_and_not_for_an_answer(pair: Pair) -> None:
    source, _ = pair
    handover = source.engine.finished_blocks(SOURCE, content(PROMPT), transfer_key=new_key(), ttl_s=0.3)
    assert kinds(source.engine.poll(10.0)) == ["Failed", "BlocksReturned"]
    assert handover.over


def test_a_second_engine_event_loop_may_watch_the_descriptor(pair: Pair) -> None:
    source, _ = pair
    source.hand_over(SOURCE, PROMPT, ttl_s=0.2)
    found: list[object] = []
    while not any(isinstance(event, Failed) for event in found):
        assert readable(WAIT_S, source.engine)
        found += source.engine.poll()


def test_kv_transfer_params_pass_a_router_that_writes_its_own_json(pair: Pair) -> None:
    source, destination = pair
    made = source.fill(SOURCE, seed=6)
    handover = source.hand_over(SOURCE, PROMPT)
    sent = json.dumps({"id": "cmpl-1", "kv_transfer_params": handover.kv_transfer_params})
    relayed = json.loads(sent)["kv_transfer_params"] | {"remote_port": 1, "tp_size": 8, "x": None}
    arrived = json.loads(json.dumps(relayed, sort_keys=True, indent=3, ensure_ascii=True).replace("=", "\\u003d"))
    assert arrived["do_remote_prefill"] is True
    grant = from_json(arrived)
    assert grant == handover.grant
    pull = destination.engine.pull(grant, content(PROMPT))
    pull.start(TARGET)
    received(destination.finish(pull))
    assert np.array_equal(destination.read(TARGET), made)


def test_an_engine_may_hold_hundreds_of_transfers_in_one_step(pair: Pair) -> None:
    source, destination = pair
    made = source.fill(range(60), seed=7)
    prompts = [tokens(16, seed=i) for i in range(60)]
    handovers = [
        source.engine.finished_blocks([i], content(prompt), transfer_key=new_key()) for i, prompt in enumerate(prompts)
    ]
    pulls = [destination.engine.pull(h.grant, content(p)) for h, p in zip(handovers, prompts, strict=True)]
    for i, pull in enumerate(pulls):
        pull.start([63 - i])
    source.engine.flush()
    events = destination.poll_until(lambda _: all(pull.over for pull in pulls))
    assert {id(e.transfer) for e in events if isinstance(e, Received)} == {id(pull) for pull in pulls}
    assert len(events) == 60
    assert np.array_equal(destination.read([63 - i for i in range(60)]), made)
    assert len(source.poll_until(lambda _: all(h.over for h in handovers))) == 60
