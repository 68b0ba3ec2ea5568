"""Re-packs that are cut short by a lost read, a re-key, a disconnect or a close."""

import threading
from dataclasses import replace
from typing import Any

import pytest

from kvgrpc.core.events import PostingEnded, Rekeyed
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.core.values.strips import Strip
from kvgrpc.datapath import staging_arena
from kvgrpc.datapath.copy import strips
from kvgrpc.datapath.reports import Disconnected, Report
from tests.datapath.movers import DONE, Held, HeldWritten, Rank, until
from tests.datapath.peers import DEADLINE_S
from tests.datapath.repacks import BLOCK, BLOCKS, HEAD_OF_EACH, THREE, post, stage, staging_rank


def begins_anew(rank: Rank, held: Held) -> None:
    """Asserts that the data path began anew, and that all of the arena is free again."""
    rank.next(Rekeyed)
    rank.mover.connect("h", RankEndpoint(0), ["held"])
    rank.mapped()
    held.state = DONE
    post(rank, "a", 8)
    assert rank.next(PostingEnded).done
    assert rank.mover.close(0.0)


def test_room_of_a_lost_posting_is_never_handed_on_and_refusals_say_so() -> None:
    held = Held()
    rank = staging_rank(held)
    post(rank, "lost", 4)
    until(lambda: len(held.buffers) == 1)
    rank.mover.connect("h2", RankEndpoint(0), ["held"])
    rank.mapped()
    rank.post("waits in vain", "h2", **stage(6))
    held.break_at = "poll"
    ended = {(found := rank.next(PostingEnded)).posting_id: found for _ in range(2)}
    assert not ended["lost"].quiesced
    vain = ended["waits in vain"]
    assert (vain.done, vain.quiesced) == (False, True)
    assert f"{4 * BLOCK} are lost" in vain.message
    held.break_at = ""
    held.state = DONE
    for name, blocks in (("a", 4), ("b", 3)):
        rank.post(name, "h2", **stage(blocks))
        assert rank.next(PostingEnded).done
    lost, *others = held.buffers
    end = lost.segment.address + lost.segment.nbytes
    assert all(buffer.segment.address >= end for buffer in others)
    rank.post("too large", "h2", **stage(5))
    assert "are lost" in rank.next(PostingEnded).message
    rank.mover.close(0.0)


def test_room_of_a_lost_posting_is_good_again_once_its_data_path_began_anew() -> None:
    held = HeldWritten()
    rank = staging_rank(held)
    held.break_at = "poll"
    post(rank, "lost", 5)
    assert not rank.next(PostingEnded).quiesced
    held.break_at = ""
    rank.mover.rekey()
    rank.next(Disconnected)
    assert rank.next(PostingEnded).quiesced
    begins_anew(rank, held)


def test_a_rekey_ends_what_is_read_and_what_waits_and_frees_its_room() -> None:
    held = HeldWritten()
    rank = staging_rank(held)
    post(rank, "reads", 8)
    post(rank, "waits", 8)
    rank.mover.rekey()
    ended = [rank.next(PostingEnded) for _ in range(2)]
    assert [(end.posting_id, end.done, end.quiesced) for end in ended] == [
        ("reads", False, True),
        ("waits", False, True),
    ]
    rank.next(Disconnected)
    begins_anew(rank, held)


def test_a_disconnected_peer_s_postings_still_get_room_and_end() -> None:
    held = Held()
    rank = staging_rank(held)
    post(rank, "a", 8)
    post(rank, "b", 8)
    rank.mover.disconnect("h")
    held.state = DONE
    assert [rank.next(PostingEnded).done for _ in "ab"] == [True, True]
    rank.next(Disconnected)
    assert rank.mover.close(0.0)


def test_close_ends_what_is_read_and_what_waits() -> None:
    held = Held()
    rank = staging_rank(held)
    post(rank, "reads", 8)
    post(rank, "waits", 8)
    assert rank.mover.close(0.0)
    ended = [rank.next(PostingEnded) for _ in range(2)]
    assert [(end.done, end.quiesced) for end in ended] == [(False, True)] * 2


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds all copies of strips until the returned event is set."""
    may, copy = threading.Event(), strips.copier()

    def wait(strip: Strip) -> None:
        may.wait(DEADLINE_S)
        copy(strip)

    monkeypatch.setattr(strips, "copier", lambda: wait)
    return may


class Rekeying(HeldWritten):
    """A path that says when it is about to be re-keyed."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_why = threading.Event()

    @property
    def late_writes(self) -> str:  # type: ignore[override]
        self.asked_why.set()
        return ""


IN_PIECES: dict[str, Any] = {"runs": BLOCKS, "repack": replace(THREE, strips=(HEAD_OF_EACH, HEAD_OF_EACH))}
"""Options of a re-pack with more than one piece, which threads then copy: the same strip twice."""


def two_paths(held: HeldWritten) -> Rank:
    """Makes a rank connected to "h" by a path that can be re-keyed, and to "p" by one that cannot and reads at once."""
    other = Held()
    other.name, other.state = "other", DONE
    rank = Rank(lambda _: [held, other], staging_bytes=8 * BLOCK, copy_threads=1)
    for peer, path in (("h", "held"), ("p", "other")):
        rank.mover.connect(peer, RankEndpoint(0), [path])
        rank.mapped()
    return rank


def test_a_rekey_lets_re_packs_of_other_paths_go_on(copies: threading.Event) -> None:
    rank = two_paths(HeldWritten())
    rank.post("re-packs", "p", **IN_PIECES)
    post(rank, "reads", 3)
    rank.mover.rekey()
    ended = rank.next(PostingEnded)
    assert (ended.posting_id, ended.done, ended.quiesced) == ("reads", False, True)
    rank.next(Disconnected)
    rank.next(Rekeyed)
    copies.set()
    ended = rank.next(PostingEnded)
    assert (ended.posting_id, ended.done, ended.message) == ("re-packs", True, "")
    assert rank.mover.close(0.0)


def test_re_packs_that_end_with_those_of_a_re_keyed_path_are_reported_before_it_is(
    copies: threading.Event,
) -> None:
    held = Rekeying()
    held.state = DONE
    rank = two_paths(held)
    rank.post("own", "h", **IN_PIECES)
    rank.post("other", "p", **IN_PIECES)
    rank.mover.rekey()
    assert held.asked_why.wait(DEADLINE_S)
    copies.set()
    before = list[Report]()
    while not isinstance(report := rank.reports.get(timeout=DEADLINE_S), Rekeyed):
        before.append(report)
    ends = [report for report in before if isinstance(report, PostingEnded)]
    assert {end.posting_id for end in ends} == {"own", "other"}
    assert all(end.quiesced for end in ends)
    rank.post("again", "p", **IN_PIECES)
    assert rank.next(PostingEnded).done
    assert rank.mover.close(0.0)


@pytest.mark.parametrize("closes", [True, False])
def test_the_arena_is_kept_for_a_lost_posting_only_if_its_path_did_not_close(
    closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = list[object]()
    monkeypatch.setattr(staging_arena, "_KEPT", kept)
    held = Held()
    rank = staging_rank(held)
    held.break_at = "poll"
    post(rank, "lost", 4)
    assert not rank.next(PostingEnded).quiesced
    held.break_at = "" if closes else "close"
    assert rank.mover.close(0.0) is closes
    assert kept == ([] if closes else [held.buffers[0].keeps])
