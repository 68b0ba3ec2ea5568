"""Telemetry of a move: the engine whose ranks moved the bytes gets it once, reduced over its ranks."""

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.telemetry import MoveTelemetry
from tests.core.nodes import Lead, describe
from tests.core.pairs import MODES, Pair, Writers
from tests.core.receive.pull_stages import TOKEN, P, opened, settled


def test_a_pull_says_what_moved_and_how_long_that_and_submitting_it_took() -> None:
    lead = Lead(describe("d", 2))
    lead.admit(P)
    pull = lead.pull(TOKEN, 32, (4, 5))
    opened(lead)
    lead.feed(events.PostingEnded(f"{pull.id}/0.0", True, 32, wire_s=0.25, post_s=0.125))
    settled(lead)
    (news,) = lead.news()
    assert news.telemetry == MoveTelemetry(nbytes=32, descriptors=2, wire_s=0.25, post_s=0.125)


def test_what_is_posted_in_slices_takes_as_long_as_all_of_them() -> None:
    lead = Lead(describe("d", 2), Limits(in_flight_bytes=16))
    lead.admit(P)
    pull = lead.pull(TOKEN, 32, (4, 5))
    opened(lead)
    for _ in range(2):
        assert lead.one(actions.Post).runs.total_bytes == 16
        lead.feed(events.PostingEnded(f"{pull.id}/0.0", True, 16, wire_s=0.25, post_s=0.125))
    settled(lead)
    (news,) = lead.news()
    assert (news.telemetry.nbytes, news.telemetry.wire_s, news.telemetry.post_s) == (32, 0.5, 0.25)


def test_a_pull_of_what_is_here_already_moved_nothing() -> None:
    lead = Lead(describe("d", 2))
    lead.admit(P)
    lead.pull(TOKEN, destination=events.Destination((), 32))
    opened(lead)
    settled(lead)
    assert [news.telemetry for news in lead.news()] == [None]


@MODES
@pytest.mark.parametrize("ranks", [1, 2])
def test_of_a_push_the_side_that_moves_is_told_by_its_slowest_rank(writers: Writers, ranks: int) -> None:
    pair = Pair(writers, describe("p", 1, world_size=ranks))
    pair.register(pair.reserve(40, range(10, 13)).token)
    pair.finish(40, (5, 6, 7))
    sizes = [(post.runs.total_bytes, len(post.runs)) for _, post in pair.posts]
    nbytes, runs = (sum(values) for values in zip(*sizes, strict=True))
    for rank in range(ranks):
        pair.moved(1, wire_s=0.25 * (rank + 1), post_s=0.125 / (rank + 1))
    expected = MoveTelemetry(nbytes, runs, wire_s=0.25 * ranks, post_s=0.125)
    (returned,) = pair.told["p"]
    assert returned.telemetries == ((expected,) if writers else ())
    assert pair.told["d"][-1].telemetry == (None if writers else expected)


@MODES
def test_parts_that_move_one_by_one_are_told_as_one(writers: Writers) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32, range(2)).token)
    for layer in range(2):
        pair.finish(32, (9, 8), last=bool(layer), layers=(layer, 1))
        pair.moved(wire_s=0.25, post_s=0.125)
    found = [*pair.told["p"][-1].telemetries, *filter(None, [pair.told["d"][-1].telemetry])]
    assert [(one.nbytes, one.wire_s, one.post_s) for one in found] == [(32, 0.5, 0.25)]
