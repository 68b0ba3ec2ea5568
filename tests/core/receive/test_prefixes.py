"""A prompt that differs from the offer takes, with `allow_prefix`, the whole units before the difference."""

from typing import Any

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.actions import LayersReceivedNews, Post, PullOpenedNews, ReceivedNews, SendOpen, SendSettle
from kvgrpc.core.events import Opened
from kvgrpc.core.tables.transfers import State
from kvgrpc.core.values import content as contents
from kvgrpc.core.values.content import ContentId, chain
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, Strides, uniform_layout
from kvgrpc.errors import Reason
from tests.core.access.openings import opening, reason
from tests.core.nodes import Lead, access_id, aliased, answer_of, claim, content, describe, grant, hybrid, lists
from tests.core.pairs import MODES, READING, Pair
from tests.core.receive.pull_stages import P, failure_of, opened, posted, settled

OFFER = grant(P, tokens=64)


def parting(at: int, tokens: int = 64) -> ContentId:
    """Makes the content of a prompt that equals `content` up to token `at`, and differs from there."""
    return chain([*range(at), *range(1000, 1000 + tokens - at)], weights_revision="w")


def wanted(of: ContentId, tokens: int = 64) -> contents.ContentClaim:
    return contents.claim(of, 64, tokens, prefix=True)


@pytest.fixture
def lead() -> Lead:
    """Makes a lead that is connected to P."""
    made = Lead(describe("d", 2))
    made.admit(P)
    return made


def pulling(lead: Lead, at: int = 40, *blocks: Any, **fields: Any) -> Any:
    return lead.pull(OFFER, 64, *blocks, content=parting(at), allow_prefix=True, **fields)


# -- at the source


@pytest.mark.parametrize(("at", "blocks"), [(16, [5]), (40, [5, 6]), (63, [5, 6, 7])])
def test_a_source_reads_out_the_units_that_both_have(at: int, blocks: list[int]) -> None:
    lead = Lead(describe("p", 1))
    lead.admit(d := describe("d", 2))
    made = lead.finish(64, (5, 6, 7, 8))
    asked = opening(made.token, claim=wanted(parting(at)))
    for _ in range(2):
        (row,) = lead.opened(d, asked)
        assert isinstance(row, Opened)
        assert [ids.tolist() for _, ids in row.blocks] == [blocks]
        assert (row.token_count, row.offer_tokens) == (16 * len(blocks), 64)
    pins = lead.state.pool.pins.of_block(0, 8)
    assert len(pins) == 1, "that of the lease"


@pytest.mark.parametrize("asked", [wanted(parting(15)), claim(64, 7), wanted(content(64, 1))])
def test_without_a_unit_in_common_nothing_is_opened(asked: contents.ContentClaim) -> None:
    lead = Lead(describe("p", 1))
    lead.admit(d := describe("d", 2))
    made = lead.finish(64)
    (row,) = lead.opened(d, opening(made.token, claim=asked))
    assert reason(row) is Reason.CONTENT_MISMATCH


def test_a_state_of_more_tokens_serves_no_prefix() -> None:
    pool = hybrid(GroupKind.STATE)
    lead = Lead(describe("p", 1, pool=pool))
    lead.admit(d := describe("d", 2, pool=pool))
    made = lead.finish(64)
    (row,) = lead.opened(d, opening(made.token, claim=wanted(parting(40))))
    assert reason(row) is Reason.CONTENT_RANGE


def test_what_a_claim_states_is_weighed() -> None:
    lead = Lead(describe("p", 1))
    lead.admit(d := describe("d", 2))
    made = lead.finish(64)
    lead.opened(d, opening(made.token, 1), opening(made.token, 2, claim=wanted(content(64))))
    plain, stating = (lead.state.access.rows[access_id(number)] for number in (1, 2))
    assert stating.kept_bytes - plain.kept_bytes >= 4 * 32


# -- at the destination


def test_only_who_takes_a_prefix_says_what_it_has(lead: Lead) -> None:
    lead.pull(OFFER, 64, (1, 2, 3, 4))
    assert lead.one(SendOpen).opening.claim == claim(64)
    pulling(lead, 40, (5, 6, 7, 8), number=2)
    assert lead.one(SendOpen).opening.claim == wanted(parting(40))
    weight = {pull.transfer_id: pull.kept_bytes for pull in lead.state.receive.transfers.values()}
    assert len(set(weight.values())) == 2, "what is stated is weighed"


def test_the_blocks_of_what_comes_are_filled_and_the_others_left(lead: Lead) -> None:
    pull = pulling(lead, 40, (4, 5, 6, 7))
    opened(lead, tokens=32, offer_tokens=64)
    assert lead.one(Post).runs.dst.tolist() == [4 * 8, 4 * 8 + 512]
    moving = lead.transfer(pull.id)
    assert (moving.use_tokens, moving.blocks, moving.nbytes) == (32, 2, 32)
    posted(lead, pull)
    settled(lead)
    assert lead.news() == [ReceivedNews(pull.id, "", 32)]
    assert (len(lead.state.pool.pins), lead.state.timers.next_deadline()) == (0, None)


def test_what_is_here_of_the_prefix_does_not_come_again(lead: Lead) -> None:
    pull = pulling(lead, 40, (5, 6, 7), have_tokens=16)
    opened(lead, tokens=32, offer_tokens=64)
    assert lead.one(Post).runs.dst.tolist() == [5 * 8, 5 * 8 + 512]
    assert lead.transfer(pull.id).blocks == 1


@pytest.mark.parametrize("have", [32, 48])
def test_where_more_is_here_than_both_have_nothing_moves(lead: Lead, have: int) -> None:
    pull = pulling(lead, 40, (6, 7) if have == 32 else (7,), have_tokens=have)
    opened(lead, tokens=32, offer_tokens=64)
    assert lead.seen(Post) == []
    assert lead.one(SendSettle).settling == events.AccessSettling(access_id(), last=True, nbytes=0)
    settled(lead)
    assert lead.news() == [ReceivedNews(pull.id, "", 32)]
    assert len(lead.state.pool.pins) == 0


def test_blocks_that_come_later_are_for_all_that_was_asked_for(lead: Lead) -> None:
    pull = pulling(lead)
    opened(lead, tokens=32, offer_tokens=64)
    assert lead.news() == [PullOpenedNews(pull.id, "", 32)]
    lead.give(pull.id, (4, 5, 6, 7))
    assert lead.one(Post).runs.dst.tolist() == [4 * 8, 4 * 8 + 512]
    assert lead.transfer(pull.id).nbytes == 32


@pytest.mark.parametrize("tokens", [40, 0, 80])
def test_an_answer_that_is_no_prefix_makes_no_sense(lead: Lead, tokens: int) -> None:
    pull = pulling(lead, 40, (4, 5, 6, 7))
    lead.feed(events.AccessAnswered(access_id(), answer_of(P, tokens, token_count=tokens)))
    assert failure_of(lead, pull).reason is Reason.PEER_FAILED


def test_who_did_not_ask_for_a_prefix_takes_none(lead: Lead) -> None:
    pull = lead.pull(OFFER, 64, (4, 5, 6, 7))
    opened(lead, tokens=32, offer_tokens=64)
    assert failure_of(lead, pull).reason is Reason.PEER_FAILED


def test_an_answer_that_does_not_serve_the_blocks_here_makes_no_sense() -> None:
    """The window begins later for fewer tokens; no source with the same layout gives such an answer."""
    source = describe("p", 1, pool=aliased())
    lead = Lead(describe("d", 2, pool=aliased()))
    lead.admit(source)
    pull = lead.pull(grant(source, tokens=64), content=parting(40), allow_prefix=True)
    lead.feed(events.AccessAnswered(access_id(), answer_of(source, 16, [0], [1], offer_tokens=64)))
    assert "do not serve" in failure_of(lead, pull).message


def test_both_sides_agree_on_the_prefix() -> None:
    pair = Pair()
    made = pair.p.finish(64, (5, 6, 7, 8))
    into, of = events.Destination(lists((1, 2, 3, 4))), (made.token, parting(50), access_id(7))
    pull = pair.call(pair.d, lambda c: events.PullBlocks(c, *of, destination=into, allow_prefix=True)).transfer
    (post,) = pair.posts
    assert isinstance(post[1], actions.Post)
    pair.moved()
    assert pair.d.transfer(pull.id).state is State.SUCCEEDED
    assert pair.told["d"] == [ReceivedNews(pull.id, "", 48)]


# -- pushes


def pushed(writers: Any, at: int, *blocks: Any, **fields: Any) -> tuple[Pair, str]:
    """Pushes 64 tokens to a destination whose prompt differs from token `at` on."""
    pair = Pair(writers)
    made = pair.reserve(64, *blocks, content=parting(at), allow_prefix=True, **fields)
    pair.register(made.token)
    pair.finish(64, (5, 6, 7, 8))
    return pair, made.transfer.id


@MODES
def test_of_a_push_the_units_come_that_both_have(writers: Any) -> None:
    pair, transfer_id = pushed(writers, 40, (1, 2, 3, 4))
    ((_, post),) = pair.posts
    assert post.runs.dst.tolist() == [8, 520]
    assert post.runs.total_bytes == 32
    pair.moved()
    done = pair.d.transfer(transfer_id)
    assert (done.state, done.use_tokens, done.nbytes, done.nbytes_done) == (State.SUCCEEDED, 32, 32, 32)
    assert pair.told["d"][-1] == ReceivedNews(transfer_id, "", 32)
    assert len(pair.d.state.pool.pins) == len(pair.p.state.pool.pins) == 0


@MODES
@pytest.mark.parametrize(("at", "provisional"), [(40, False), (64, True)])
def test_no_layers_are_told_of_a_push_of_which_the_first_tokens_alone_come(
    writers: Any, at: int, provisional: bool
) -> None:
    pair = Pair(writers)
    made = pair.reserve(64, (1, 2, 3, 4), content=parting(at), allow_prefix=True)
    pair.register(made.token)
    pair.finish(64, (5, 6, 7, 8), last=False, layers=(0, 1))
    pair.moved()
    told = [news for news in pair.told["d"] if isinstance(news, LayersReceivedNews)]
    assert (bool(told), bool(pair.d.transfer(made.transfer.id).layers_done)) == (provisional, provisional)
    pair.finish(64, (5, 6, 7, 8), last=True, layers=(1, 1))
    pair.moved()
    assert pair.told["d"][-1] == ReceivedNews(made.transfer.id, "", at // 16 * 16)


@MODES
def test_what_is_here_of_a_push_does_not_come_again(writers: Any) -> None:
    pair, transfer_id = pushed(writers, 60, (2, 3, 4), have_tokens=16)
    ((_, post),) = pair.posts
    assert post.runs.dst.tolist() == [16, 528]
    pair.moved()
    assert pair.told["d"][-1] == ReceivedNews(transfer_id, "", 48)


@pytest.mark.parametrize(("at", "have"), [(10, 0), (40, 32), (40, 48)])
def test_a_push_that_would_bring_nothing_is_refused_by_its_destination(at: int, have: int) -> None:
    blocks = range(4)[have // 16 :]
    pair, transfer_id = pushed(READING, at, tuple(blocks), have_tokens=have)
    assert pair.posts == []
    assert failure_of(pair.d, pair.d.transfer(transfer_id)).reason is Reason.CONTENT_MISMATCH


def window(block_tokens: int) -> PoolLayout:
    """Makes one group that keeps the last 32 tokens, one byte for the key of each token and one for its value."""
    group = Group("window", GroupKind.SLIDING_WINDOW, 2, block_tokens, 64, 1, 1, "uint8", window_tokens=32)
    strides = Strides(2 * block_tokens, block_tokens, block_tokens, 1)
    return uniform_layout(group, 2 * block_tokens, strides=strides)


def windows(writers: Any) -> Pair:
    """Makes windows that begin at 64 for 112 and 128 tokens at the destination, but at 80 and 96 at the source."""
    pair = Pair(writers, describe("p", 1, pool=window(16)))
    pair.d = pair.e = pair._lead(describe("x", 9, pool=window(64)), writers)
    pair.leads, pair.told["x"] = [pair.p, pair.d], []
    pair.meet()
    return pair


@MODES
def test_a_push_whose_source_keeps_other_blocks_of_a_prefix_is_refused(writers: Any) -> None:
    pair = windows(writers)
    made = pair.reserve(128, (1,), content=parting(112, 128), allow_prefix=True)
    pair.register(made.token)
    pair.finish(128, (5, 6))
    assert pair.posts == []
    failure = failure_of(pair.d, made.transfer)
    assert (failure.reason, "not the first 112" in failure.message) == (Reason.CONTENT_RANGE, True)


@MODES
def test_a_source_does_not_push_a_prefix_that_its_blocks_do_not_serve(writers: Any) -> None:
    pair = windows(writers)
    pair.deaf = {SendOpen}
    made = pair.reserve(128, (1,), content=parting(112, 128), allow_prefix=True)
    pair.register(made.token)
    pair.finish(128, (5, 6))
    pair.feed(pair.p, events.AccessAnswered(access_id(10), answer_of(pair.d.me, 112, (1,))))
    assert (pair.posts, made.transfer.over) == ([], False)
    assert "not the first 112" in pair.p.state.send.leases.get(pair.both()[0].lease_id).trouble


def test_a_prefill_that_starts_over_brings_the_same_beginning() -> None:
    pair = Pair()
    made = pair.reserve(64, (1, 2, 3, 4), content=parting(40), allow_prefix=True)
    pair.register(made.token)
    pair.finish(64, (5,), last=False, part_epoch=0)
    pair.finish(64, (9, 10, 11, 12), part_epoch=1)
    while pair.posts:
        pair.moved()
    assert pair.told["d"][-1] == ReceivedNews(made.transfer.id, "", 32)
