"""A rank that reaches several ranks of one peer has a link, postings and an end for each of them."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvgrpc.core.events import PeerMapped, PostingEnded, ProcessEnded, Rekeyed
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.datapath.paths.shm import ShmPath
from kvgrpc.datapath.reports import Disconnected
from tests.datapath.movers import BEST_FIRST, FAILED, NBYTES, WHOLE, Held, HeldWritten, Rank, with_held
from tests.datapath.peers import CASES, DEADLINE_S, GUARD, Case, LocalPeer, Peer, ProcessPeer, runs_of

RANKS = (0, 3)
PATHS = [case for case in CASES if case.name in ("loopback", "shm", "cma", "nixl")]


@pytest.fixture(params=PATHS, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    chosen: Case = request.param
    return chosen


@pytest.fixture
def peers(case: Case) -> Iterator[dict[int, Peer]]:
    make = LocalPeer if case.in_process else ProcessPeer
    ranks: dict[int, Peer] = {rank: make(case, rank + 1, (NBYTES,)) for rank in RANKS}
    yield ranks
    for peer in ranks.values():
        peer.close()


def test_two_ranks_of_a_peer_are_read_at_once(case: Case, peers: dict[int, Peer]) -> None:
    rank = Rank(lambda memory: [case.make(memory, "own")])
    for number, peer in peers.items():
        rank.mover.connect("p", replace(peer.endpoint(), rank=number), BEST_FIRST, number)
    mapped = [rank.mapped() for _ in RANKS]
    assert {(report.peer, report.peer_rank, report.attempt) for report in mapped} == {("p", n, n) for n in RANKS}
    half = NBYTES // 2
    rank.post("a", "p", runs_of((5, 0, half)), peer_rank=0)
    rank.post("b", "p", runs_of((7, half, half - 9)), peer_rank=3)
    assert {(ended.posting_id, ended.done) for ended in (rank.next(PostingEnded) for _ in RANKS)} == {
        ("a", True),
        ("b", True),
    }
    assert np.array_equal(rank.bytes[:half], peers[0].bytes()[5 : half + 5])
    assert np.array_equal(rank.bytes[half:-9], peers[3].bytes()[7 : half - 2])
    assert (rank.bytes[-9:] == GUARD).all()
    rank.mover.disconnect("p")
    assert {rank.next(Disconnected).peer_rank for _ in RANKS} == set(RANKS)
    rank.mover.disconnect("p")
    assert rank.next(Disconnected) == Disconnected("p")
    assert rank.mover.close(DEADLINE_S)


def test_ranks_of_one_peer_ask_a_process_with_one_token(case: Case) -> None:
    """This happens when the destination has more ranks than its source."""
    if case.in_process or case.name == "nixl":
        pytest.skip("no process is asked, or only for its end")
    peer = ProcessPeer(case, 1, (NBYTES,))
    endpoint = peer.endpoint()
    ranks = [Rank(lambda memory: [case.make(memory, "own")], number=number) for number in range(3)]
    for rank in ranks:
        rank.connect("p", endpoint)
        rank.post("a", "p", WHOLE)
        assert rank.next(PostingEnded).done
        assert np.array_equal(rank.bytes, peer.content)
    rank = ranks[0]
    rank.mover.disconnect("p")
    rank.next(Disconnected)
    rank.mover.connect("p", endpoint, BEST_FIRST)
    assert "used" in str(rank.not_mapped().rejected)
    for rank in ranks:
        assert rank.mover.close(DEADLINE_S)
    peer.close()


def linked(held: Held) -> Rank:
    """Makes a rank that is connected to two ranks of peer `h`."""
    rank = with_held(held)
    for number in RANKS:
        rank.mover.connect("h", RankEndpoint(number), ["held"])
        rank.mapped()
    return rank


def test_the_rank_of_a_peer_is_connected_once() -> None:
    held = Held()
    rank = linked(held)
    rank.mover.connect("h", RankEndpoint(3), ["held"], 9)
    refused = rank.not_mapped()
    assert (refused.peer, refused.peer_rank, refused.attempt) == ("h", 3, 9)
    assert "disconnect" in refused.rejected[0][1]
    assert rank.mover.close(0.0)


def test_a_posting_fails_whose_rank_of_the_peer_is_not_connected() -> None:
    rank = linked(Held())
    rank.post("a", "h", WHOLE, peer_rank=1)
    ended = rank.next(PostingEnded)
    assert (ended.done, ended.quiesced) == (False, True)
    assert "rank 1 of the peer h is not connected" in ended.message
    assert rank.mover.close(0.0)


def test_a_peer_is_disconnected_rank_by_rank_as_its_postings_end() -> None:
    held = Held()
    rank = linked(held)
    rank.post("a", "h", WHOLE, peer_rank=3)
    rank.mover.disconnect("h")
    assert rank.next(Disconnected) == Disconnected("h", peer_rank=0)
    held.state = FAILED
    assert rank.next(PostingEnded).posting_id == "a"
    assert rank.next(Disconnected) == Disconnected("h", peer_rank=3)
    assert rank.mover.close(0.0)


def test_one_rank_of_a_peer_is_disconnected_and_the_others_stay() -> None:
    held = Held()
    rank = linked(held)
    rank.mover.disconnect("h", peer_rank=3)
    assert rank.next(Disconnected) == Disconnected("h", peer_rank=3)
    held.state = FAILED
    for number, why in ((0, "as told"), (3, "not connected")):
        rank.post("a", "h", WHOLE, peer_rank=number)
        assert why in rank.next(PostingEnded).message
    assert rank.mover.close(0.0)


def test_connects_under_way_end_with_a_disconnect() -> None:
    held = Held(waits=True)
    rank = with_held(held)
    for number in RANKS:
        rank.mover.connect("h", RankEndpoint(number), ["held"], number)
    rank.mover.connect("other", RankEndpoint(0), ["held"])
    rank.mover.disconnect("h")
    assert {(report.peer_rank, report.attempt) for report in (rank.not_mapped() for _ in RANKS)} == {(0, 0), (3, 3)}
    assert rank.next(Disconnected) == Disconnected("h")
    held.release.set()
    assert rank.next(PeerMapped).peer == "other"
    assert rank.mover.close(DEADLINE_S)


def test_the_end_of_each_rank_s_process_is_told() -> None:
    held = HeldWritten()
    rank = linked(held)
    rank.mover.await_end("h")
    rank.mover.disconnect("h", watch=True)
    for _ in RANKS:
        rank.next(Disconnected)
    first, second = held.processes
    second.ended = True
    assert rank.next(ProcessEnded) == ProcessEnded(1, "h", drained=True, peer_rank=3)
    first.ended = True
    assert rank.next(ProcessEnded) == ProcessEnded(1, "h", drained=True, peer_rank=0)
    assert first.closed
    assert second.closed
    assert rank.mover.close(0.0)


def test_a_disconnect_ends_the_wait_for_all_processes_of_a_peer() -> None:
    held = HeldWritten()
    rank = linked(held)
    rank.mover.connect("other", RankEndpoint(3), ["held"])
    rank.mapped()
    for peer in ("h", "other"):
        rank.mover.await_end(peer)
    rank.mover.disconnect("h")
    for _ in RANKS:
        rank.next(Disconnected)
    assert [process.closed for process in held.processes] == [True, True, False]
    assert rank.mover.close(0.0)


def test_a_rekey_disconnects_every_rank_of_its_path() -> None:
    held = HeldWritten()
    rank = linked(held)
    rank.post("a", "h", WHOLE, peer_rank=3)
    rank.mover.rekey()
    assert rank.next(PostingEnded).quiesced
    assert {rank.next(Disconnected).peer_rank for _ in RANKS} == set(RANKS)
    assert rank.next(Rekeyed).message == ""
    rank.mover.connect("h", RankEndpoint(3), ["held"])
    rank.mapped()
    assert rank.mover.close(0.0)


def test_an_older_peer_is_asked_as_ever_by_the_rank_of_its_own_number() -> None:
    """An older peer knows no question that names a rank."""
    seen = list[bytes]()
    pool = CASES[1].peer_memory((NBYTES,))[0]
    path = ShmPath(pool)
    socket = path._socket
    answer = socket._answer

    def listen(question: bytes, pid: int) -> object:
        seen.append(question)
        return answer(question, pid)

    socket._answer = listen  # type: ignore[method-assign,assignment]
    for number, asked in ((0, 64), (1, 66)):
        rank = Rank(lambda memory: [ShmPath(memory)], number=number)
        rank.connect("p", path.offer(RankEndpoint(0)))
        assert len(seen.pop()) == asked
        assert rank.mover.close(DEADLINE_S)
    path.close()
    pool.close()
