"""One contract for all data paths and both directions, on which the mover and the lead rely.

Each case is a data path with the kinds of memory that it is for. It reads, or writes where the source may move the
bytes. Peers are processes of their own, except for loopback. Every test checks every byte of the destination, which
held guard bytes or, if it is the peer, other bytes.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from kvgrpc.core.actions import Operation
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.datapath.base import DataPathFailed, DataPathUnavailable, PostingState, Remote, WritableRemote
from kvgrpc.datapath.copy.copy_methods import copier
from tests.datapath.peers import (
    CASES,
    GUARD,
    Case,
    LocalPeer,
    Own,
    Peer,
    ProcessPeer,
    Wake,
    blocks,
    expected,
    finish,
    move,
    own_rank,
    reach,
    runs_of,
    start,
)

Run = tuple[int, int, int]

# Odd sizes make segments end within runs and off every boundary.
PEER_SIZES = (3_000_001, 1_048_576, 5_000_003)
OWN_SIZES = (2_000_003, 4_194_304, 1_000_001)
PEER_BYTES, OWN_BYTES = sum(PEER_SIZES), sum(OWN_SIZES)
READ, WRITE = Operation


BOTH_WAYS = [(case, READ) for case in CASES] + [(case, WRITE) for case in CASES if case.writes]


@pytest.fixture(scope="module", params=BOTH_WAYS, ids=lambda both: f"{both[0].name}-{both[1].value}")
def both(request: pytest.FixtureRequest) -> tuple[Case, Operation]:
    chosen: tuple[Case, Operation] = request.param
    return chosen


@pytest.fixture(scope="module")
def operation(both: tuple[Case, Operation]) -> Operation:
    return both[1]


@pytest.fixture(scope="module")
def case(both: tuple[Case, Operation]) -> Case:
    chosen = both[0]
    if chosen.method is not None and copier(chosen.method) is None:
        pytest.skip(f"this machine cannot copy by the method {chosen.method.value}")
    return chosen


def make_peer(case: Case, seed: int) -> Peer:
    return (LocalPeer if case.in_process else ProcessPeer)(case, seed, PEER_SIZES)


@pytest.fixture(scope="module")
def peer(case: Case) -> Iterator[Peer]:
    peer = make_peer(case, seed=1)
    yield peer
    peer.close()


@pytest.fixture
def own(case: Case) -> Iterator[Own]:
    with own_rank(case, OWN_SIZES) as own:
        yield own


SHAPES = {
    "one byte": runs_of((7, 11, 1)),
    "scattered blocks of 16 KB": blocks(2, 16 << 10, 300, PEER_BYTES, OWN_BYTES),
    "scattered blocks of 4 KB": blocks(3, 4 << 10, 1700, PEER_BYTES, OWN_BYTES),
    "5,000 blocks of 96 bytes": blocks(4, 96, 5000, PEER_BYTES, OWN_BYTES),
    "odd lengths at odd places": runs_of(*((i * 3001 + 5, i * 2999 + 3, i % 2900 + 1) for i in range(2000))),
    "one run over all of the destination": runs_of((13, 0, OWN_BYTES)),
    "long and short": runs_of((0, 6_000_000, 17), (100, 65, 5_000_000), (8_999_999, 6_000_100, 1)),
    "a run of no bytes among others": runs_of((0, 0, 64), (500, 500, 0), (1000, 1000, 64)),
}


def there(operation: Operation, runs: Runs) -> Runs:
    """Returns runs from the peer's memory into the own, or for a write the same in reverse."""
    return runs if operation is READ else Runs(runs.dst, runs.src, runs.nbytes)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_byte_arrives_and_no_other_changes(peer: Peer, own: Own, operation: Operation, shape: str) -> None:
    runs = there(operation, SHAPES[shape])
    own.parts[0][:] = np.arange(len(own.parts[0])) % 251
    sources = own.bytes(), peer.bytes()
    posting = move(own.path, own.connect(peer), runs, operation)
    assert (posting.poll(), posting.error) == (PostingState.DONE, "")
    mine, theirs = sources
    if operation is READ:
        mine = expected(mine, theirs, runs)
    else:
        theirs = expected(theirs, mine, runs)
    assert np.array_equal(own.bytes(), mine)
    assert np.array_equal(peer.bytes(), theirs)


LAST = 2**63 - 1


OUT_OF_RANGE: list[Run] = [
    (PEER_BYTES, 0, 1),
    (PEER_BYTES - 99, 0, 100),
    (0, OWN_BYTES - 99, 100),
    (0, OWN_BYTES, 1),
    (-1, 0, 1),
    (0, -1, 1),
    (0, 0, -1),
    (0, 0, LAST),
    (LAST, 0, LAST),
    (LAST, LAST, 1),
    (PEER_BYTES + 1, 0, 0),
]


def test_a_run_out_of_range_is_refused_untouched(
    peer: Peer, own: Own, operation: Operation, subtests: pytest.Subtests
) -> None:
    remote = own.connect(peer)
    before = peer.bytes()
    for bad in OUT_OF_RANGE:
        with subtests.test(bad=bad):
            with pytest.raises(DataPathFailed):
                start(remote, operation, there(operation, runs_of((0, 0, 4096), bad)), Wake())
            assert (own.bytes() == GUARD).all()
            assert np.array_equal(peer.bytes(), before)


def test_runs_of_unequal_columns_are_refused(peer: Peer, own: Own, operation: Operation) -> None:
    remote = own.connect(peer)
    good = runs_of((0, 0, 64), (64, 64, 64))
    with pytest.raises(DataPathFailed):
        start(remote, operation, Runs(good.src, good.dst[:1], good.nbytes), Wake())


def test_no_runs_end_done(peer: Peer, own: Own, operation: Operation) -> None:
    posting = move(own.path, own.connect(peer), runs_of(), operation)
    assert posting.poll() is PostingState.DONE
    assert (own.bytes() == GUARD).all()


def test_only_a_path_whose_source_may_move_the_bytes_writes(case: Case, peer: Peer, own: Own) -> None:
    assert isinstance(own.connect(peer), WritableRemote) is case.writes


def test_an_end_stays_the_same(peer: Peer, own: Own, operation: Operation) -> None:
    posting = move(own.path, own.connect(peer), runs_of((0, 0, 4096)), operation)
    assert [posting.poll() for _ in range(3)] == [PostingState.DONE] * 3


def test_postings_on_one_peer_run_side_by_side(peer: Peer, own: Own, operation: Operation) -> None:
    remote = own.connect(peer)
    parts = [runs_of((i * 70_001, i * 70_001, 70_001)) for i in range(20)]
    wakes = [Wake() for _ in parts]
    postings = [start(remote, operation, part, wake) for part, wake in zip(parts, wakes, strict=True)]
    states = [finish(own.path, p, wake) for p, wake in zip(postings, wakes, strict=True)]
    assert states == [PostingState.DONE] * 20
    assert np.array_equal(own.bytes()[: 20 * 70_001], peer.bytes()[: 20 * 70_001])


def test_two_peers_at_once(case: Case, peer: Peer, own: Own, operation: Operation) -> None:
    other = make_peer(case, seed=2)
    try:
        remotes = [own.connect(peer), own.connect(other)]
        for part in own.parts:
            part[:] = 77
        half = [there(operation, runs) for runs in (runs_of((0, 0, 3_000_000)), runs_of((1000, 3_000_000, 3_000_000)))]
        before = own.bytes()
        wakes = Wake(), Wake()
        postings = [start(remotes[i], operation, half[i], wakes[i]) for i in range(2)]
        assert [finish(own.path, postings[i], wakes[i]) for i in range(2)] == [PostingState.DONE] * 2
        if operation is READ:
            after = expected(before, peer.bytes(), half[0])
            assert np.array_equal(own.bytes(), expected(after, other.content, half[1]))
        else:
            assert np.array_equal(other.bytes(), expected(other.content, before, half[1]))
        remotes[1].close()
        own.remotes.pop()
        assert move(own.path, remotes[0], half[0], operation).poll() is PostingState.DONE
    finally:
        other.close()


def test_a_closed_peer_can_be_connected_again(peer: Peer, own: Own, operation: Operation) -> None:
    own.connect(peer).close()
    own.remotes.clear()
    assert move(own.path, own.connect(peer), runs_of((5, 6, 7)), operation).poll() is PostingState.DONE


def test_it_says_how_the_bytes_will_move(peer: Peer, own: Own) -> None:
    assert len(own.connect(peer).why) > 20


def test_a_peer_that_does_not_offer_this_path_is_refused_with_a_reason(own: Own) -> None:
    with pytest.raises(DataPathUnavailable, match="offer"):
        reach(own.path, RankEndpoint(0))


def test_a_killed_peer_ends_a_posting_and_never_hangs(case: Case, own: Own, operation: Operation) -> None:
    """Memory that is mapped here outlives its process, so its bytes arrive; other paths give a typed failure."""
    if case.in_process:
        pytest.skip("a rank in this process dies with it")
    victim = ProcessPeer(case, 3, PEER_SIZES)
    remote = own.connect(victim)
    victim.kill()
    state, error = outcome(own, remote, runs_of((0, 0, 1_000_000)), operation)
    if case.name.startswith(("shm", "cuda_vmm")):
        assert state is PostingState.DONE
        assert np.array_equal(own.bytes()[:1_000_000], victim.content[:1_000_000])
    else:
        assert state is PostingState.FAILED
        assert error
    victim.close()


def outcome(own: Own, remote: Remote, runs: Runs, operation: Operation) -> tuple[PostingState, str]:
    """Returns the end of a posting, also when nothing was started."""
    try:
        posting = move(own.path, remote, runs, operation)
    except DataPathFailed as error:
        return PostingState.FAILED, error.message
    return posting.poll(), posting.error


def test_close_is_idempotent_and_ends_all_access(case: Case, peer: Peer, operation: Operation) -> None:
    """A posting that close cut short never becomes DONE afterwards."""
    with own_rank(case, OWN_SIZES) as own:
        remote = own.connect(peer)
        posting = start(remote, operation, runs_of((0, 0, OWN_BYTES)), Wake())
        own.path.close()
        own.path.close()
        own.remotes.clear()
        state = posting.poll()
        done = np.array_equal(own.bytes(), peer.bytes()[:OWN_BYTES])
        assert state is not PostingState.DONE or done
        own.reset()
        theirs = peer.bytes()
        assert posting.poll() is state
        assert (own.bytes() == GUARD).all()
        assert state is PostingState.UNPROVED or np.array_equal(peer.bytes(), theirs)
