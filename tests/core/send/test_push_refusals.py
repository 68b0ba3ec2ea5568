"""Errors in the calls of a push are found before anything changes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.transfers import State
from kvgrpc.core.values.grants import AccessKind
from kvgrpc.core.values.layout import GroupKind
from kvgrpc.core.values.owners import ENGINE
from kvgrpc.errors import Reason
from tests.core.nodes import (
    KEY,
    SECRET,
    access_id,
    claim,
    content,
    describe,
    full,
    grant,
    hybrid,
    ids,
    lists,
    refused,
    snapshot,
)
from tests.core.pairs import MODES, WRITING, Pair, Writers


def unchanged(pair: Pair, reason: Reason, do: Callable[[], Any]) -> None:
    before = snapshot(pair.p.node), snapshot(pair.d.node)
    with refused(reason):
        do()
    assert (snapshot(pair.p.node), snapshot(pair.d.node)) == before


PARTS: dict[str, tuple[Reason, dict[str, Any]]] = {
    "overlapping blocks": (Reason.BLOCK_DUPLICATE, {"blocks": lists((1, 2))}),
    "a block twice": (Reason.BLOCK_DUPLICATE, {"blocks": lists((2, 2))}),
    "an unknown group": (Reason.GROUP_MISMATCH, {"blocks": ((3, ids(2)),)}),
    "a group twice": (Reason.GROUP_MISMATCH, {"blocks": ((0, ids(2)), (0, ids(3)))}),
    "an unknown block": (Reason.BLOCK_OUT_OF_RANGE, {"blocks": lists((64,))}),
    "more blocks than the content": (Reason.CONTENT_RANGE, {"blocks": lists((2, 3, 4, 5))}),
    "a last part with a block missing": (Reason.CONTENT_RANGE, {"blocks": lists((2,)), "last": True}),
    "a last part with a layer missing": (
        Reason.CONTENT_RANGE,
        {"blocks": lists((2, 3)), "last": True, "layers": (0, 1)},
    ),
    "unknown layers": (Reason.INVALID_FIELD, {"layers": (1, 2)}),
    "no layers": (Reason.INVALID_FIELD, {"layers": (1, 0)}),
    "another content": (Reason.CONTENT_MISMATCH, {"content": content(48, 7)}),
    "no blocks": (Reason.EMPTY_FINISH, {"blocks": ()}),
    "another lease": (Reason.INVALID_FIELD, {"lease_id": "l-2"}),
    "a lower epoch": (Reason.PREEMPTED, {"part_epoch": 1}),
    "a higher epoch without blocks": (Reason.EMPTY_FINISH, {"part_epoch": 3, "blocks": (), "last": True}),
    "a higher epoch of another content": (Reason.CONTENT_MISMATCH, {"part_epoch": 3, "content": content(48, 7)}),
    "readers of the same request": (
        Reason.WAITS_FOR_MISMATCH,
        {"waits_for": events.WaitsFor.READERS, "last": True, "part_epoch": 0, "content": content(16)},
    ),
    "too many consumers": (Reason.LIMIT_EXCEEDED, {"consumers": 65}),
    "readers": (Reason.WAITS_FOR_MISMATCH, {"waits_for": events.WaitsFor.READERS, "last": True}),
    "a short key": (Reason.INVALID_FIELD, {"key": b"short"}),
}


@MODES
@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_wrong_changes_nothing(name: str, writers: Writers) -> None:
    reason, fields = PARTS[name]
    pair = Pair(writers)
    pair.register(pair.reserve(48).token)
    pair.finish(48, (1,), last=False, part_epoch=2)
    part: dict[str, Any] = {"last": False, "blocks": lists((2,)), "content": None, "part_epoch": 2} | fields
    unchanged(pair, reason, lambda: pair.finish(**part))


def test_no_other_caller_adds_a_part_to_a_push_though_it_knows_the_key() -> None:
    pair = Pair()
    pair.finish(48, (1,), last=False)
    part = events.FinishedBlocks(
        events.Call(99, "router"), KEY, lists((2,)), None, waits_for=events.WaitsFor.REGISTRATION, last=False
    )
    before = snapshot(pair.p.node)
    (refusal,) = pair.p.feed(part)
    assert isinstance(refusal, actions.Refuse)
    assert refusal.error.reason is Reason.TRANSFER_EXISTS
    assert snapshot(pair.p.node) == before


def test_a_caller_that_ends_a_push_by_its_key_does_not_become_its_owner() -> None:
    pair = Pair()
    sent = pair.finish(48, (1,), last=False).transfer
    given_up = events.FinishedBlocks(
        events.Call(99, "router"), KEY, (), None, waits_for=events.WaitsFor.REGISTRATION, failure="no more"
    )
    pair.feed(pair.p, given_up)
    assert pair.p.transfer(sent.id).owner == ENGINE
    assert "BlocksReturnedNews" in [type(news).__name__ for news in pair.told["p"]]


def test_parts_after_the_last_are_refused() -> None:
    pair = Pair()
    pair.register(pair.reserve(32).token)
    pair.finish(32, (1, 2))
    unchanged(pair, Reason.TRANSFER_ENDED, lambda: pair.finish(32, (3,)))
    pair.moved()
    unchanged(pair, Reason.TRANSFER_ENDED, lambda: pair.finish(32, (3,)))


def test_layers_of_the_same_blocks_follow_one_another() -> None:
    pair = Pair()
    pair.finish(48, (1, 2), last=False, layers=(0, 1))
    pair.finish(48, (1,), last=False, layers=(1, 1))
    unchanged(pair, Reason.BLOCK_DUPLICATE, lambda: pair.finish(48, (3,), last=False))
    unchanged(pair, Reason.BLOCK_DUPLICATE, lambda: pair.finish(48, (3,), last=False, layers=(1, 1)))
    pair.finish(48, (2, 3), last=False, layers=(1, 1))
    pair.finish(48, (3,), last=True, layers=(0, 1))


def test_a_group_without_the_layers_lists_no_blocks() -> None:
    groups = replace(full().groups[0], layers=2), replace(hybrid().groups[1], layers=1)
    regions = (*full().regions, replace(hybrid().regions[1], offset=full().total_bytes))
    pool = replace(full(), groups=groups, regions=regions, total_bytes=full().total_bytes + 512)
    pair = Pair(p=describe("p", 1, pool=pool))
    pair.register(pair.reserve(32).token)
    unchanged(pair, Reason.INVALID_FIELD, lambda: pair.finish(32, (1, 2), (1,), last=False, layers=(1, 1)))
    pair.finish(32, (1, 2), (), last=False, layers=(1, 1))
    pair.moved()
    assert pair.both()[1].layers_done == ((1, 1),)
    pair.finish(32, (1, 2), (1,), layers=(0, 1))
    pair.moved()
    assert pair.both()[1].state is State.SUCCEEDED


def test_a_last_part_may_be_empty_but_not_the_first() -> None:
    pair = Pair()
    unchanged(pair, Reason.EMPTY_FINISH, lambda: pair.finish(32, blocks=()))
    pair.register(pair.reserve(32).token)
    pair.finish(32, (1, 2), last=False)
    pair.moved()
    pair.finish(blocks=(), content=None)
    assert pair.both()[1].state is State.SUCCEEDED


def test_the_first_part_states_the_content() -> None:
    pair = Pair()
    unchanged(pair, Reason.CONTENT_REQUIRED, lambda: pair.finish(32, content=None))


def test_what_is_only_validated_changes_nothing() -> None:
    pair = Pair()
    token = pair.reserve(32, key=KEY + b"2").token
    pair.register(token)
    before = snapshot(pair.p.node.state.pool.pins), snapshot(pair.d.node.state.pool.pins)
    assert pair.finish(32, validate_only=True).transfer is None
    assert pair.finish(key=KEY + b"2", failure="no", blocks=(), validate_only=True).transfer.state is State.PENDING
    assert pair.reserve(16, (9,), validate_only=True) == actions.BlocksReserved(None, b"")
    assert (snapshot(pair.p.node.state.pool.pins), snapshot(pair.d.node.state.pool.pins)) == before


def test_readers_have_one_part() -> None:
    pair = Pair()
    readers = partial(pair.finish, 32, waits_for=events.WaitsFor.READERS)
    for wrong in ({"last": False}, {"layers": (0, 1)}, {"part_epoch": 1}, {"failure": "no"}):
        unchanged(pair, Reason.WAITS_FOR_MISMATCH, partial(readers, **wrong))


def test_blocks_for_readers_are_not_pushed() -> None:
    pair = Pair()
    token = pair.reserve(32).token
    pair.finish(32, waits_for=events.WaitsFor.READERS)
    unchanged(pair, Reason.WAITS_FOR_MISMATCH, lambda: pair.register(token))
    unchanged(pair, Reason.WAITS_FOR_MISMATCH, lambda: pair.finish(32))


def test_blocks_that_are_pushed_are_not_read_by_others() -> None:
    pair = Pair()
    pair.finish(32, lease_id="l-mine")
    wanted = AccessOpening(access_id(70), grant(pair.p.me, lease_id="l-mine"), claim(32))
    (row,) = pair.p.opened(pair.d.me, wanted)
    assert row.reason is Reason.WAITS_FOR_MISMATCH


def test_a_registration_takes_a_write_grant_of_one_destination() -> None:
    pair = Pair()
    unchanged(pair, Reason.GRANT_WRONG_ACCESS, lambda: pair.register(grant(pair.p.me)))
    unchanged(pair, Reason.GRANT_INVALID, lambda: pair.register(b"rubbish"))
    token = pair.reserve(32).token
    first = pair.register(token)
    assert pair.register(token, number=40) == first
    other = grant(pair.d.me, access=AccessKind.WRITE, key=KEY, lease_id="l-9")
    pair.finish(32, (1,), last=False)
    unchanged(pair, Reason.TRANSFER_EXISTS, lambda: pair.register(other, number=50))


@MODES
@pytest.mark.parametrize("name", ["forged", "another target", "ended"])
def test_a_grant_that_the_destination_does_not_know_brings_nothing_there(name: str, writers: Writers) -> None:
    pair = Pair(writers)
    answer = pair.reserve(32)
    tokens = {
        "forged": grant(pair.d.me, access=AccessKind.WRITE, secret=b"other"),
        "another target": grant(pair.d.me, access=AccessKind.WRITE, secret=SECRET, lease_id="l-9"),
        "ended": answer.token,
    }
    if name == "ended":
        pair.call(pair.d, lambda c: events.CancelTransfer(c, answer.transfer.id))
    pair.register(tokens[name])
    pair.finish(32)
    sent = pair.both()[0]
    if name == "ended":
        assert sent.state is State.CANCELLED, "its only destination was cancelled: nobody will come"
        assert not len(pair.p.state.pool.pins)
        return
    assert (sent.over, sent.waiting_for) == (False, "registration")
    with refused(Reason.TRANSFER_ENDED):
        pair.register(tokens[name])
    pair.register(answer.token, number=50)
    pair.moved()
    assert [t.state for t in pair.both()] == [State.SUCCEEDED] * 2


@MODES
def test_another_prompt_is_not_delivered(writers: Writers) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32).token)
    sent = pair.finish(32, content=content(32, 5)).transfer
    assert not pair.posts
    assert pair.both()[0].waiting_for == "registration"
    assert "CONTENT" not in pair.p.state.send.leases.get(sent.lease_id).trouble
    assert "engine d: " in pair.p.state.send.leases.get(sent.lease_id).trouble
    assert pair.reasons()[1] is Reason.CONTENT_MISMATCH


def test_states_stand_for_the_whole_prompt() -> None:
    pair = Pair(p=describe("p", 1, pool=hybrid(GroupKind.STATE)))
    pair.register(pair.reserve(48, (1,), (1,), use_tokens=16).token)
    sent = pair.finish(48, (1, 2, 3), (7,)).transfer
    assert "serves all 48 tokens" in pair.p.state.send.leases.get(sent.lease_id).trouble
    assert not pair.posts


def test_cancelling_comes_before_registration_and_finish() -> None:
    pair = Pair()
    token = pair.reserve(32).token
    assert pair.call(pair.p, lambda c: events.CancelTransfer(c, key=KEY)).outcome == "tombstoned"
    unchanged(pair, Reason.CANCELLED, lambda: pair.register(token))
    unchanged(pair, Reason.CANCELLED, lambda: pair.finish(32))
    assert pair.call(pair.e, lambda c: events.CancelTransfer(c, key=KEY)).outcome == "tombstoned"
    with refused(Reason.CANCELLED):
        pair.reserve(32, at=pair.e)


def test_a_reservation_that_is_wrong_changes_nothing() -> None:
    pair = Pair()
    pair.reserve(32)
    unchanged(pair, Reason.TRANSFER_EXISTS, lambda: pair.reserve(32, (9, 10)))
    unchanged(pair, Reason.BLOCK_PINNED, lambda: pair.reserve(32, key=KEY + b"2"))
    unchanged(pair, Reason.CONTENT_REQUIRED, lambda: pair.reserve(32, (9, 10), key=KEY + b"2", content=None))
    unchanged(pair, Reason.BLOCK_COUNT_MISMATCH, lambda: pair.reserve(32, (9,), key=KEY + b"2"))
    unchanged(pair, Reason.INVALID_FIELD, lambda: pair.reserve(32, (9, 10), key=b"short"))
    unchanged(pair, Reason.BLOCK_COUNT_MISMATCH, lambda: pair.reserve(32, (), key=KEY + b"2"))


def test_the_same_idempotency_key_gives_the_same_part_and_registration() -> None:
    pair = Pair()
    token = pair.reserve(32).token
    call = {"key": "k", "method": "m"}
    assert pair.register(token, call=call) == pair.register(token, call=call)
    assert pair.finish(32, (1,), last=False, call={"key": "f"}) is pair.finish(32, (1,), last=False, call={"key": "f"})
    pair.tick(61.0)
    assert len(pair.p.state.keys) == 2, "as long as what they created"


def test_ready_parts_are_checked_like_all_that_a_peer_says() -> None:
    pair = Pair()
    pair.register(pair.reserve(32).token)
    pair.finish(32, (1,), last=False)

    def ready(number: int, *blocks: int, access: bytes = access_id(10), source: str = "p") -> None:
        row = events.ReadyPart(number, lists(blocks), (), None, last=False)
        pair.call(pair.d, lambda c: events.PartsReady(c, source, 1, access, (row,)), "peer")

    unchanged(pair, Reason.ACCESS_NOT_FOUND, lambda: ready(1, 5, access=access_id(99)))
    unchanged(pair, Reason.NO_HANDSHAKE, lambda: ready(1, 5, source="x"))
    unchanged(pair, Reason.INVALID_FIELD, lambda: ready(2, 5))
    unchanged(pair, Reason.BLOCK_DUPLICATE, lambda: ready(1, 1))
    pair.call(pair.d, lambda c: events.CancelTransfer(c, pair.both()[1].id))
    unchanged(pair, Reason.CANCELLED, lambda: ready(1, 5))


def test_a_source_that_writes_has_no_ready_parts() -> None:
    pair = Pair(WRITING)
    pair.register(pair.reserve(32).token)
    pair.finish(32, (1,), last=False)
    row = events.ReadyPart(0, lists((1,)), (), None, last=False)
    with refused(Reason.ACCESS_REUSED):
        pair.call(pair.d, lambda c: events.PartsReady(c, "p", 1, access_id(10), (row,)), "peer")


def test_a_push_is_delivered_under_one_access() -> None:
    pair = Pair()
    token = pair.reserve(32).token
    pair.register(token)
    pair.finish(32, (1,), last=False)
    twice = AccessOpening(access_id(60), token, None, push_content=content(32))
    (row,) = pair.d.opened(pair.p.me, twice)
    assert row.reason is Reason.ACCESS_REUSED
    same = AccessOpening(access_id(10), token, None, reverse_access_id=access_id(11), push_content=content(32))
    (row,) = pair.d.opened(pair.p.me, same)
    assert isinstance(row, events.Opened)
    (row,) = pair.d.opened(pair.p.me, replace(same, reverse_access_id=b""))
    assert row.reason is Reason.ACCESS_REUSED


def test_a_reverse_access_has_a_new_random_id() -> None:
    pair = Pair()
    token = pair.reserve(32).token
    wanted = AccessOpening(access_id(60), token, None, reverse_access_id=b"short", push_content=content(32))
    (row,) = pair.d.opened(pair.p.me, wanted)
    assert row.reason is Reason.INVALID_FIELD


@MODES
def test_an_access_to_write_has_an_id_that_no_other_access_has(writers: Writers) -> None:
    """A source knows the ids of the accesses that were opened at it."""
    pair = Pair(writers)
    token = pair.reserve(32).token
    pull = pair.d.pull(grant(pair.p.me, key=b"another request!"), 32, (8, 9), number=70)
    assert pair.d.one(actions.SendOpen).opening.access_id == access_id(70)
    for reverse in (b"", access_id(71)):
        taken = AccessOpening(access_id(70), token, None, reverse_access_id=reverse, push_content=content(32))
        unchanged_by_row(pair, taken, Reason.ACCESS_REUSED)
    assert not pair.d.transfer(pull.id).over


def test_an_access_id_stands_for_one_kind_of_access() -> None:
    pair = Pair()
    token = pair.reserve(32).token
    pair.register(token)
    pair.finish(32, (1,), last=False)
    same = AccessOpening(access_id(10), token, None, reverse_access_id=access_id(11), push_content=content(32))
    assert isinstance(pair.d.opened(pair.p.me, same)[0], events.Opened)
    unchanged_by_row(pair, replace(same, push_content=None), Reason.ACCESS_REUSED)
    unchanged_by_row(pair, replace(same, push_content=content(32, 7)), Reason.ACCESS_REUSED)


def unchanged_by_row(pair: Pair, opening: AccessOpening, reason: Reason) -> None:
    before = snapshot(pair.d.node)
    (row,) = pair.d.opened(pair.p.me, opening)
    assert row.reason is reason
    assert snapshot(pair.d.node) == before
