"""Re-keys and operator releases during other work: what they prove, and what they leave alone."""

from collections.abc import Sequence
from typing import Any

from kvgrpc.core import actions, events
from kvgrpc.core.moves.course import ASK_DELAY_MAX_S
from kvgrpc.core.node import Node
from kvgrpc.core.tables.accesses import AccessState
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import Direction, Disposition, State, Transfer
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import DeadlineExceeded, Reason, Unavailable
from tests.core.nodes import Lead, access_id, answer_of, describe, grant, key_of, refused
from tests.core.pairs import READING, WRITING, Pair
from tests.core.pool.written import Written

KEYS = (b"1" * 16, b"2" * 16, b"3" * 16)


class Reader(Written):
    """A destination that pulls, with a new key each time."""

    def pulls(self, number: int, *blocks: int) -> str:
        """Starts a pull, and returns its posting id."""
        source = describe("s", 8)
        self.pull(grant(source, key=KEYS[number]), 32, blocks, number=number + 1)
        self.connect(source)
        self.feed(events.AccessAnswered(access_id(number + 1), answer_of(source)))
        return self.one(actions.Post).posting_id

    def of(self, number: int) -> Transfer:
        found: Transfer = self.state.transfers.with_key(KEYS[number])[0]
        return found


def lost_write() -> tuple[Pair, str, str]:
    """Loses a source's write, cancels the push, and returns the pair, the push's transfer id and the posting id."""
    pair = Pair(WRITING)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    ((_, post),) = pair.posts
    sent, _ = pair.both()
    pair.moved(done=False, quiesced=False, own_at_rest=False)
    pair.call(pair.p, lambda c: events.CancelTransfer(c, sent.id))
    return pair, sent.id, post.posting_id


def dispositions(pair: Pair) -> Sequence[Disposition]:
    return [transfer.memory for transfer in pair.both()]


def test_a_word_about_a_source_s_memory_is_none_about_the_memory_that_it_writes() -> None:
    pair = Pair(WRITING)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    sent, _ = pair.both()
    pair.call(pair.p, lambda c: events.CancelTransfer(c, sent.id))
    force: Any = {"force": True, "transfer_ids": (sent.id,), "why": "nothing writes here"}
    pair.call(pair.p, lambda c: events.ReleaseQuarantine(c, **force), "operator")
    assert dispositions(pair) == [Disposition.RETURNED, Disposition.QUARANTINED]
    assert {action.closing.quiesced for action in pair.sent if isinstance(action, actions.SendClose)} == {False}


def test_a_rekey_gives_a_source_the_blocks_back_whose_write_was_lost_and_proves_nothing_to_the_destination() -> None:
    pair, transfer_id, posting = lost_write()
    assert dispositions(pair) == [Disposition.QUARANTINED] * 2
    assert "ReleaseQuarantine may prove it" in pair.p.node.missing_proof(transfer_id)
    call = pair.p.ask(events.ReleaseQuarantine, "operator")
    assert pair.p.state.pool.rekeying
    pair.feed(pair.p, events.PostingEnded(posting, done=False, quiesced=False, own_at_rest=True))
    pair.feed(pair.p, events.Rekeyed(0))
    assert isinstance(pair.p.answer(call), actions.QuarantineReleased)
    assert dispositions(pair) == [Disposition.RETURNED, Disposition.QUARANTINED]


def test_who_asks_for_a_rekey_that_takes_too_long_already_is_told_so_as_well() -> None:
    lead = Written()
    lead.push(3, 4)
    first = lead.release()
    lead.tick(30.0)
    lead.tick(15.0)
    with refused(Reason.DEADLINE, DeadlineExceeded):
        lead.answer(first)
    second = lead.release()
    lead.tick(15.0)
    with refused(Reason.DEADLINE, DeadlineExceeded):
        lead.answer(second)


def test_what_no_rekey_can_prove_takes_no_time_from_what_comes_to_rest_by_itself() -> None:
    lead = Reader(sets_aside=False)
    lost = lead.pulls(0, 8, 9)
    lead.feed(events.PostingEnded(lost, done=False, quiesced=False))
    lead.tick(10.0)
    lead.tick(30.0)
    lead.rekeyed(message="the path could not be begun anew")
    assert sum(lead.state.pool.pins.quarantined) == 2
    lead.tick(300.0)
    cancelled = lead.pulls(1, 10, 11)
    lead.pulls(2, 20, 21)
    lead.call(lambda c: events.CancelTransfer(c, lead.of(1).id))
    lead.tick(9.9)
    assert not lead.state.pool.rekeying
    lead.feed(events.PostingEnded(cancelled, done=False))
    assert lead.of(1).memory is Disposition.RETURNED
    assert lead.of(2).state is State.ACTIVE


def opened_in_a_rekey(*blocks: int, last: bool) -> Pair:
    """Makes a pair whose source registered its memory again while a destination came for a push."""
    pair = Pair(READING)
    source = describe("s", 8)
    pair.p.pull(grant(source, key=KEYS[0]), 32, (20, 21), number=1)
    pair.p.connect(source)
    pair.p.feed(events.AccessAnswered(access_id(1), answer_of(source)))
    pair.p.feed(events.PostingEnded(pair.p.one(actions.Post).posting_id, done=False, quiesced=False))
    pair.finish(32, blocks, last=last)
    token = pair.reserve(32, (3, 4)).token
    pair.p.ask(events.ReleaseQuarantine, "operator")
    pair.register(token)
    pair.feed(pair.p, events.Rekeyed(0))
    assert pair.p.state.life.engine.memory_generation == 1
    return pair


def test_what_peers_opened_while_the_memory_was_registered_anew_is_of_the_memory_before() -> None:
    pair = opened_in_a_rekey(1, 2, last=True)
    assert [access.state for access in pair.p.state.access.rows.values()] != [AccessState.OPEN]
    pair.moved()
    assert pair.both()[1].state is not State.SUCCEEDED


def test_a_push_that_was_opened_while_the_memory_was_registered_anew_ends_with_its_next_part() -> None:
    pair = opened_in_a_rekey(1, last=False)
    pair.finish(32, (2,))
    pair.moved()
    (sent,) = [transfer for transfer in pair.p.state.transfers if transfer.direction is Direction.SEND]
    assert (sent.over, sent.waiting_for) == (False, "registration")
    assert pair.reasons()[1] is Reason.SOURCE_FAILED


def test_a_checksum_that_comes_late_of_parts_that_were_replaced_is_not_asked_for_again() -> None:
    pair = Pair()
    pair.d.node = Node(Limits(), checksums=True)
    pair.d.begin(describe("d", 2))
    pair.meet()
    pair.deaf = {actions.SendChecksums, actions.ComputeChecksums}
    pair.register(pair.reserve(48, (3, 4), have_tokens=16).token)
    pair.finish(48, (1, 2), last=False)
    pair.moved()
    pair.tick(ASK_DELAY_MAX_S)
    asked = [action for _, action in pair.lost if isinstance(action, actions.SendChecksums)]
    late: Any = Unavailable(Reason.LIMIT_EXCEEDED, "busy")
    pair.feed(pair.d, events.ChecksumsAnswered(asked[-1].name, 0, late, retryable=True))
    pair.deaf.add(actions.SendSettle)
    pair.finish(48, (5,), last=False, part_epoch=1)
    pair.tick(0.25)
    assert [action for _, action in pair.lost if isinstance(action, actions.SendChecksums)] == asked


def test_a_rekey_that_proves_something_proves_nothing_about_what_was_written_before_one_that_did_not() -> None:
    lead = Written()
    lead.push(3, 4)
    for message in ("the data path did not end", ""):
        lead.tick(60.0)
        lead.release()
        lead.tick(60.0)
        lead.rekeyed(message=message)
        assert not lead.state.pool.rekeying
        assert lead.memory() is Disposition.QUARANTINED
    lead.exit()
    assert lead.memory() is Disposition.RETURNED


def test_only_the_rows_of_lives_that_may_still_write_are_kept_of_processes_that_ended() -> None:
    lead: Lead = Written(ranks=2)
    for number in range(100):
        peer = describe("p", 100 + number, world_size=2)
        lead.admit(peer)
        lead.feed(events.ProcessEnded(0, key_of(peer), drained=True))
    assert 0 < len(lead.node.state.pool.proofs.processes_ended) <= len(lead.state.peers.lives)


def test_a_lead_does_not_wake_up_for_what_a_rekey_did_not_help() -> None:
    lead = Written(quarantine_share=0.02)
    lead.push(3, 4)
    lead.tick(40.0)
    lead.tick(0.0)
    lead.rekeyed(message="a peer may write on")
    lead.tick(60.0)
    lead.tick(10.0)
    assert lead.memory() is Disposition.QUARANTINED
    assert lead.state.timers.when(Timer.QUARANTINE, "") is None


def test_what_comes_into_quarantine_after_a_rekey_that_did_not_help_has_its_own() -> None:
    lead = Written(quarantine_share=0.04)
    lead.push(3, 4)
    lead.release()
    lead.tick(30.0)
    lead.rekeyed(message="a peer may write on")
    lead.admit(lead.peer)
    lead.tick(60.0)
    lead.push(5, 6, number=11)
    lead.tick(9.9)
    assert not lead.state.pool.rekeying
    lead.tick(0.1)
    assert lead.state.pool.rekeying
