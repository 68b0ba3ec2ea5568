"""Small copies within `Mover.post`: when they are made, and that nothing is closed under them."""

import itertools
import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from kvgrpc.core.actions import MapPeer, Operation
from kvgrpc.core.events import PostingEnded
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.core.values.pieces import Pieces
from kvgrpc.datapath.base import PostingState
from kvgrpc.datapath.copy.checksums import ChecksumThreads
from kvgrpc.datapath.copy.crew import PIECE_BYTES_MIN
from kvgrpc.datapath.host.libc import IOV_MAX
from kvgrpc.datapath.host.memory import SharedMemory
from kvgrpc.datapath.local_rank import LocalRank
from kvgrpc.datapath.paths.cma import AT_ONCE_BYTES, CmaPath
from kvgrpc.datapath.paths.shm import ShmPath
from kvgrpc.datapath.reports import Disconnected
from kvgrpc.errors import AlreadyExists, Unavailable
from tests.datapath.movers import NBYTES, Held, HeldRemote, Rank, post_of, until
from tests.datapath.peers import CASES, DEADLINE_S, GUARD, ProcessPeer, content, runs_of

LITTLE = runs_of((0, 0, PIECE_BYTES_MIN))
MUCH = runs_of((0, 0, PIECE_BYTES_MIN + 1))


@pytest.fixture
def source() -> Iterator[ShmPath]:
    memory = SharedMemory.create(NBYTES)
    memory.as_numpy()[:] = content(1, NBYTES)
    path = ShmPath(memory)
    yield path
    path.close()
    memory.close()


@pytest.fixture
def rank(source: ShmPath) -> Iterator[Rank]:
    rank = Rank(lambda memory: [ShmPath(memory)])
    rank.connect("p", source.offer(RankEndpoint(0)))
    yield rank
    rank.mover.close(0.0)


def test_a_small_read_ends_within_its_call_and_is_not_reported(rank: Rank) -> None:
    ended = rank.post("a", "p", LITTLE, at_once=True)
    assert ended is not None
    assert (ended.posting_id, ended.done, ended.nbytes) == ("a", True, PIECE_BYTES_MIN)
    assert (rank.bytes[:PIECE_BYTES_MIN] == content(1, NBYTES)[:PIECE_BYTES_MIN]).all()
    assert (rank.bytes[PIECE_BYTES_MIN:] == GUARD).all()
    rank.mover.disconnect("p")
    assert rank.next(Disconnected) == Disconnected("p", peer_rank=0)


def test_memory_of_another_process_is_read_within_the_call_while_the_process_lives() -> None:
    """Runs that are cut where the peer's arrays end are still one piece."""
    sizes = (AT_ONCE_BYTES // 2, *[1] * IOV_MAX, AT_ONCE_BYTES // 2)
    peer = ProcessPeer(next(case for case in CASES if case.name == "cma"), 1, sizes)
    rank = Rank(lambda memory: [CmaPath(memory)])
    rank.connect("p", peer.endpoint())
    whole = runs_of((0, 0, AT_ONCE_BYTES))
    ended = rank.post("a", "p", whole, at_once=True)
    assert ended is not None
    assert (ended.done, ended.nbytes) == (True, AT_ONCE_BYTES)
    assert (rank.bytes == peer.content[:AT_ONCE_BYTES]).all()
    for runs in (runs_of((0, 0, AT_ONCE_BYTES), (0, 0, 1)), Runs(*np.ones((3, IOV_MAX + 1), dtype=np.int64))):
        assert rank.post("b", "p", runs, at_once=True) is None
        assert rank.next(PostingEnded).done
    peer.kill()
    lost = rank.post("c", "p", whole, at_once=True) or rank.next(PostingEnded)
    assert (lost.done, lost.quiesced) == (False, True)
    rank.mover.close(0.0)
    peer.close()


def test_its_name_is_free_again(rank: Rank) -> None:
    assert all(rank.post("a", "p", LITTLE, at_once=True) for _ in range(3))


@pytest.mark.parametrize(
    ("peer", "runs", "operation"),
    [
        ("p", MUCH, Operation.READ),
        ("p", Runs(*np.ones((3, 2048), dtype=np.int64)), Operation.READ),
        ("p", LITTLE, Operation.WRITE),
        ("p", runs_of((NBYTES, 0, 1)), Operation.READ),
        ("nobody", LITTLE, Operation.READ),
    ],
    ids=["much", "many runs", "a write", "out of bounds", "not connected"],
)
def test_all_else_is_reported_as_ever(rank: Rank, peer: str, runs: Runs, operation: Operation) -> None:
    assert rank.post("a", peer, runs, operation, at_once=True) is None
    assert rank.next(PostingEnded).posting_id == "a"


def test_nothing_is_copied_within_a_call_that_does_not_ask_for_it(rank: Rank) -> None:
    assert rank.post("a", "p", LITTLE) is None
    assert rank.next(PostingEnded).done


def test_what_is_to_be_summed_up_is_not_copied_within_the_call() -> None:
    memory = SharedMemory.create(NBYTES)
    sums = ChecksumThreads(0, memory, 1, print)
    rank = Rank(lambda memory: [ShmPath(memory)])
    source = ShmPath(memory)
    rank.connect("p", source.offer(RankEndpoint(0)))
    none = np.empty(0, dtype=np.int64)
    arrival = sums.arrival("s", Pieces(none, none, none))
    assert rank.post("a", "p", LITTLE, arrival=arrival, at_once=True) is None
    assert rank.next(PostingEnded).done
    for end in (sums.close, partial(rank.mover.close, 0.0), source.close, memory.close):
        end()


def test_a_rank_with_a_bandwidth_limit_copies_at_its_pace(source: ShmPath) -> None:
    rank = Rank(lambda memory: [ShmPath(memory)], bandwidth_limit_bytes_per_s=1e9)
    rank.connect("p", source.offer(RankEndpoint(0)))
    assert rank.post("a", "p", LITTLE, at_once=True) is None
    assert rank.next(PostingEnded).done
    rank.mover.close(0.0)


class Slow(Held):
    """A path that copies within `read` for as long as a test likes, and records the order of events."""

    def __init__(self) -> None:
        super().__init__(waits=True)  # a peer then connects only after earlier commands
        self.release.set()
        self.connecting = threading.Event()
        self.may_connect = threading.Event()
        self.state = PostingState.DONE
        self.order: list[str] = []
        self.copying = threading.Event()
        self.go_on = threading.Event()

    def step(self, name: str) -> None:
        if name in ("remote close", "close"):
            self.order.append(name)

    def connect(self, *_: object) -> HeldRemote:
        if self.connect_hangs:
            self.connecting.set()
            self.may_connect.wait(DEADLINE_S)
        return SlowRemote(self)


class SlowRemote(HeldRemote):
    path: Slow

    def ends_at_once(self, _: Runs) -> bool:
        return True

    def read(self, *arguments: object) -> object:  # type: ignore[override]
        self.path.copying.set()
        self.path.go_on.wait(DEADLINE_S)
        self.path.order.append("copied")
        return super().read(*arguments)  # type: ignore[arg-type]


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def beside(slow: Slow) -> Rank:
    rank = Rank(lambda _: [slow])
    rank.mover.connect("h", RankEndpoint(0), ["held"])
    rank.mapped()
    return rank


@pytest.mark.parametrize("way", ["close", "disconnect"])
def test_nothing_is_closed_under_a_copy(slow: Slow, beside: Rank, way: str) -> None:
    mover = beside.mover
    copy = threading.Thread(target=lambda: mover.post(post_of("a", "h", LITTLE), at_once=True))
    copy.start()
    assert slow.copying.wait(DEADLINE_S)
    end = threading.Thread(target=partial(mover.close, 0.0) if way == "close" else partial(mover.disconnect, "h"))
    end.start()
    slow.go_on.set()
    copy.join(DEADLINE_S)
    end.join(DEADLINE_S)
    assert mover.close(DEADLINE_S)
    assert slow.order == ["copied", "remote close", "close"]


def test_no_copy_begins_once_its_end_was_asked_for(slow: Slow, beside: Rank) -> None:
    slow.connect_hangs = True
    beside.mover.connect("other", RankEndpoint(0), ["held"])
    assert slow.connecting.wait(DEADLINE_S)
    beside.mover.disconnect("h")
    assert beside.post("a", "h", LITTLE, at_once=True) is None
    slow.may_connect.set()
    beside.mapped()
    assert beside.next(Disconnected).peer == "h"
    assert not beside.next(PostingEnded).done
    assert slow.order == ["remote close"]
    assert beside.mover.close(0.0)
    with pytest.raises(Unavailable):
        beside.post("b", "other", LITTLE, at_once=True)
    assert not slow.copying.is_set()


def test_a_posting_under_way_keeps_its_name_and_its_peer_to_itself(slow: Slow, beside: Rank) -> None:
    slow.state = PostingState.PENDING
    slow.go_on.set()
    beside.post("a", "h", LITTLE)
    with pytest.raises(AlreadyExists):
        beside.post("a", "h", LITTLE, at_once=True)
    assert beside.post("b", "h", LITTLE, at_once=True) is None
    slow.state = PostingState.DONE
    assert {beside.next(PostingEnded).posting_id for _ in range(2)} == {"a", "b"}
    assert beside.mover.close(0.0)


def test_a_rank_in_a_process_of_an_engine_copies_in_its_own_thread(source: ShmPath) -> None:
    """Only an owner that sets `feed_here` gets copies in its thread."""
    here, there = list[object](), threading.Event()
    memory = SharedMemory.create(NBYTES)
    mapped = threading.Event()

    def hear(event: object) -> None:
        (there if isinstance(event, PostingEnded) else mapped).set()

    rank = LocalRank(0, memory, [ShmPath(memory)], hear)
    rank.perform(MapPeer(0, "p", source.offer(RankEndpoint(0)), 0))
    assert mapped.wait(DEADLINE_S)
    rank.perform(post_of("a", "p", LITTLE))
    assert there.wait(DEADLINE_S)
    rank.feed_here = here.append
    for name in map(str, itertools.count()):  # until the thread is at rest
        rank.perform(post_of(name, "p", LITTLE))
        if here:
            break
    assert [type(event) for event in here] == [PostingEnded]
    until(lambda: rank.accessed_peers == set())
    rank.close(0.0)
