"""Checksums at the destination are compared with the source's before a round is settled."""

from typing import Any

import numpy as np
import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.moves import course
from kvgrpc.core.node import Node
from kvgrpc.core.tables.accesses import Verdict
from kvgrpc.core.tables.transfers import Disposition, State
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import Exhausted, PreconditionFailed, Reason
from tests.core.nodes import Lead, access_id, answer_of, describe, grant
from tests.core.pairs import WRITING, Pair

UNAVAILABLE = Exhausted(Reason.LIMIT_EXCEEDED, "busy", retry_delay_s=0.1)


def sums(*values: int) -> bytes:
    return np.array(values, dtype="<u4").tobytes()


class Comparing(Lead):
    """A destination that pulls two blocks and compares their checksums."""

    def __init__(self, ranks: int = 1, **limits: Any) -> None:
        super().__init__(describe("d", 2, world_size=ranks))
        self.node = Node(Limits(**limits), checksums=True)
        self.begin(describe("d", 2, world_size=ranks))
        self.source = describe("p", 1, world_size=ranks)
        self.pulled = self.pull(grant(self.source), 32, (8, 9))
        self.connect(self.source)
        self.feed(events.AccessAnswered(access_id(), answer_of(self.source, 32, (3, 4))))
        self.posted = self.seen(actions.Post)
        assert not self.seen(actions.SendChecksums), "nothing holds up the first bytes"
        self.tick(course.ASK_DELAY_MAX_S)
        self.asked = self.one(actions.SendChecksums)

    def move(self) -> None:
        for post in self.posted:
            self.feed(events.PostingEnded(post.posting_id, done=True, nbytes=1))

    def here(self, *values: int, rank: int = 0, message: str = "", part: int | str = 0) -> None:
        self.feed(events.ChecksumsComputed(rank, f"{self.asked.name}.{part}", sums(*values), message))

    def there(self, result: Any, retryable: bool = False) -> None:
        self.feed(events.ChecksumsAnswered(self.asked.name, 0, result, retryable))

    def settled(self, stale: Reason | None = None) -> None:
        self.feed(events.SettleAnswered(access_id(), Verdict(stale is None, stale)))

    def end(self) -> tuple[State, Disposition, Any]:
        found = self.transfer(self.pulled.id)
        return found.state, found.memory, found.failure and found.failure.reason


def summed(post: actions.Post) -> actions.ComputeChecksums:
    assert post.checksums is not None
    return post.checksums


def test_the_source_is_asked_while_the_bytes_move_and_settled_with_when_both_agree() -> None:
    lead = Comparing()
    ((blocks, layers),) = lead.asked.blocks
    assert ([found.tolist() for found in blocks], layers) == ([[3, 4]], None)
    (post,) = lead.posted
    assert summed(post).pieces.offsets.tolist()[:1] == [8 * 8]
    lead.move()
    assert lead.transfer(lead.pulled.id).waiting_for == "checksums"
    lead.here(1, 2)
    assert not lead.seen(actions.SendSettle)
    lead.there((sums(1, 2),))
    assert lead.one(actions.SendSettle)


def test_checksums_that_come_before_the_end_of_a_posting_wait_for_it() -> None:
    lead = Comparing(ranks=2)
    lead.there((sums(1, 2), sums(3, 4)))
    lead.here(1, 2)
    lead.here(3, 4, rank=1)
    assert not lead.seen(actions.SendSettle)
    lead.move()
    assert lead.one(actions.SendSettle)


def test_what_may_be_in_flight_at_once_has_checksums_of_its_own() -> None:
    """Each of the two blocks has 8 bytes in each of its two layers."""
    lead = Comparing(in_flight_bytes=16)
    (first,) = lead.posted
    assert first.runs.total_bytes == 16
    assert len(summed(first).pieces.counts) == 1
    lead.there((sums(1, 2),))
    lead.feed(events.PostingEnded(first.posting_id, done=True, nbytes=16))
    second = lead.one(actions.Post)
    assert summed(second).name != summed(first).name
    lead.here(1)
    assert not lead.seen(actions.SendSettle)
    lead.feed(events.PostingEnded(second.posting_id, done=True, nbytes=16))
    for nonsense in (2, "x"):
        lead.here(2, part=nonsense)
    assert not lead.seen(actions.SendSettle)
    lead.here(2, part=1)
    assert lead.one(actions.SendSettle)


def test_the_checksum_of_a_block_larger_than_what_may_be_in_flight_comes_when_all_of_it_moved() -> None:
    lead = Comparing(in_flight_bytes=8)
    for moved in range(4):
        (post,) = lead.posted
        assert post.runs.total_bytes == 8
        assert (post.checksums is not None) == moved % 2
        lead.feed(events.PostingEnded(post.posting_id, done=True, nbytes=8))
        lead.posted = lead.seen(actions.Post)
    assert not lead.posted


@pytest.mark.parametrize("first", ["here", "there"])
def test_a_difference_fails_the_pull_whichever_side_is_first(first: str) -> None:
    lead = Comparing(ranks=2)
    theirs = (sums(1, 2), sums(3, 4))
    if first == "there":
        lead.there(theirs)
    lead.move()
    lead.here(1, 2)
    lead.here(3, 5, rank=1)
    if first == "here":
        lead.there(theirs)
    assert not lead.one(actions.SendSettle).settling.last, "its consumer does not count"
    lead.settled()
    assert lead.end() == (State.FAILED, Disposition.RETURNED, Reason.CHECKSUM_MISMATCH)
    assert lead.one(actions.SendClose)
    failure = lead.transfer(lead.pulled.id).failure
    assert failure is not None
    assert failure.message.startswith(
        "1 blocks of rank 1 differ from their source's: block 4 of group 0, received into"
    )


def test_a_difference_of_blocks_that_were_taken_back_meanwhile_is_none() -> None:
    lead = Comparing()
    lead.move()
    lead.here(1, 2)
    lead.there((sums(1, 3),))
    lead.settled(Reason.LEASE_VOIDED)
    assert lead.end()[2] is Reason.LEASE_VOIDED
    assert lead.one(actions.SendClose)


def test_who_compares_is_not_written_to() -> None:
    pair = Pair(WRITING)
    pair.d.node = Node(Limits(), WRITING, checksums=True)
    pair.d.begin(describe("d", 2))
    pair.meet()
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    assert not pair.posts
    assert pair.reasons()[0] is None, "another destination may come"


def test_checksums_that_cannot_be_had_or_compared_fail_the_pull() -> None:
    for there, message, reason in (
        ((sums(1, 2),), "no library", Reason.DATA_PATH_FAILED),
        ((sums(1),), "", Reason.PEER_FAILED),
        ((), "", Reason.PEER_FAILED),
    ):
        lead = Comparing()
        lead.move()
        lead.there(there)
        lead.here(*(() if message else (1, 2)), message=message)
        assert lead.end()[2] is reason
    lead = Comparing()
    lead.there(PreconditionFailed(Reason.LEASE_EXPIRED, "too late"))
    assert lead.end()[2] is Reason.LEASE_EXPIRED
    lead.here(1, 2)
    lead.there((sums(1, 2),))


def test_an_answer_that_may_come_yet_is_asked_for_again_within_the_transfer_timeout() -> None:
    lead = Comparing()
    lead.there(UNAVAILABLE, retryable=True)
    lead.tick(0.2)
    assert lead.one(actions.SendChecksums).name == lead.asked.name
    lead.there(UNAVAILABLE, retryable=True)
    lead.tick(30.0)
    assert lead.end()[2] is Reason.TRANSFER_TIMEOUT


def test_what_is_pushed_is_compared_round_by_round() -> None:
    pair = Pair()
    pair.d.node = Node(Limits(), checksums=True)
    pair.d.begin(pair.d.me if pair.d.node.state.life.description else describe("d", 2))
    pair.meet()
    pair.deaf = {actions.SendChecksums, actions.ComputeChecksums}
    pair.register(pair.reserve(32, (3, 4)).token)
    for number, block in enumerate((1, 2)):
        pair.finish(32, (block,), last=number == 1)
        pair.moved()
        pair.tick(course.ASK_DELAY_MAX_S)
        names = {action.name for _, action in pair.lost if isinstance(action, actions.SendChecksums)}
        name = max(names)
        pair.feed(pair.d, events.ChecksumsComputed(0, f"{name}.0", sums(7)))
        assert pair.both()[1].state is State.ACTIVE
        pair.feed(pair.d, events.ChecksumsAnswered(name, 0, (sums(7),)))
        pair.feed(pair.d, events.ChecksumsAnswered(name, 0, (sums(8),)))
    assert [t.state for t in pair.both()] == [State.SUCCEEDED] * 2


def test_a_push_that_arrived_as_something_else_fails_and_its_source_does_not_count_that_destination() -> None:
    pair = Pair()
    pair.d.node = Node(Limits(), checksums=True)
    pair.d.begin(describe("d", 2))
    pair.meet()
    pair.deaf = {actions.SendChecksums, actions.ComputeChecksums}
    pair.register(pair.reserve(16, (3,)).token)
    pair.finish(16, (1,))
    pair.moved()
    pair.tick(course.ASK_DELAY_MAX_S)
    ((name, _),) = {(action.name, 0) for _, action in pair.lost if isinstance(action, actions.SendChecksums)}
    pair.feed(pair.d, events.ChecksumsComputed(0, f"{name}.0", sums(7)))
    pair.feed(pair.d, events.ChecksumsAnswered(name, 0, (sums(8),)))
    source, destination = pair.both()
    assert (destination.state, pair.reasons()[1]) == (State.FAILED, Reason.CHECKSUM_MISMATCH)
    assert (source.over, source.consumers_done) == (False, 0), "another destination may come"


def test_the_answers_of_a_source_that_is_asked_in_turn_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "ANSWER_BYTES", 4)  # the default splits calls only above 16,384 blocks
    lead = Comparing()
    assert [blocks[0].tolist() for blocks, _ in lead.asked.blocks] == [[3]]
    lead.there((sums(1),))
    second = lead.one(actions.SendChecksums)
    assert ([blocks[0].tolist() for blocks, _ in second.blocks], second.number) == ([[4]], 1)
    lead.there((sums(7),))  # a duplicate of the first answer
    lead.feed(events.ChecksumsAnswered(second.name, 1, (sums(2),)))
    lead.move()
    lead.posted = lead.seen(actions.Post)
    lead.here(1)
    lead.move()
    lead.here(2, part=1)
    lead.settled()
    assert lead.end()[0] is State.SUCCEEDED


def test_answers_that_name_now_more_ranks_and_now_fewer_are_no_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "ANSWER_BYTES", 4)
    lead = Comparing()
    lead.move()
    lead.posted = lead.seen(actions.Post)
    lead.here(1)
    lead.move()
    lead.here(2, part=1)
    lead.there((sums(1),))
    lead.feed(events.ChecksumsAnswered(lead.asked.name, 1, (sums(2), sums(2))))
    assert lead.end()[2] is Reason.PEER_FAILED
