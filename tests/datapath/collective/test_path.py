"""Epochs and sequence numbers of sends, and errors that break a process group, between this process and another."""

import queue
import socket
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvgrpc.core.values.block_ids import Ids
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import CollectiveEndpoint, RankEndpoint
from kvgrpc.core.values.sends import MEET, SendAsk
from kvgrpc.datapath.base import DataPathFailed, DataPathUnavailable, PostingState, Remote
from kvgrpc.datapath.collective import group
from kvgrpc.datapath.collective.half import CONNECTIONS, TOKEN_BYTES, Half
from kvgrpc.datapath.collective.messages import FRAMING
from kvgrpc.datapath.collective.path import JOBS_MAX, WAITING_RUNS_MAX, CollectivePath
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.host.own_host import own_host
from tests.datapath.peers import CASES, DEADLINE_S, GUARD, Own, ProcessPeer, Wake, finish, own_rank, runs_of
from tests.datapath.pumped import HOST, LEAD, LOST, RANK, PumpedPath, Said

SIZE = 8 << 20
(CASE,) = [case for case in CASES if case.name == "collective"]
SOME = runs_of((5, 9, 1_000), (70_000, 2_000, 3_000_000))


NOBODY = Half(bytes(TOKEN_BYTES), ((socket.inet_aton(HOST), 65_535),) * CONNECTIONS)
"""Half of a peer that does not come and is waited for: its port is the highest."""
AWAITED_S = 2.0
"""Time for which such a peer is waited for, in seconds: longer than its test takes."""


class Asked:
    """A peer behind its lead: records asks, and lets a test change the answers."""

    def __init__(self, peer: ProcessPeer) -> None:
        self.peer = peer
        self.asks: list[SendAsk] = []
        self.changed: Callable[[SendAsk], Said | None] = lambda _: None
        self.name = ""

    def __call__(self, peer: str, ask: SendAsk) -> Said:
        self.name = peer
        self.asks.append(ask)
        return self.changed(ask) or self.peer.send(peer, ask)

    @property
    def numbers(self) -> list[tuple[int, int]]:
        return [(ask.epoch, ask.sequence) for ask in self.asks]


@pytest.fixture(scope="module")
def peer() -> Iterator[ProcessPeer]:
    made = ProcessPeer(CASE, 1, (SIZE,))
    yield made
    made.close()


@pytest.fixture
def own() -> Iterator[Own]:
    with own_rank(CASE, (SIZE,)) as made:
        yield made


@pytest.fixture
def asked(peer: ProcessPeer) -> Asked:
    return Asked(peer)


def connect(own: Own, asked: Asked) -> Remote:
    assert isinstance(own.path, PumpedPath)
    remote = own.path.connect(asked.peer.endpoint(), asked)
    own.remotes.append(remote)
    return remote


def read(own: Own, remote: Remote, runs: Runs = SOME) -> tuple[PostingState, str]:
    wake = Wake()
    posting = remote.read(runs, wake)
    return finish(own.path, posting, wake), posting.error


def test_ranks_meet_first_and_sends_are_numbered_from_one_on(own: Own, asked: Asked) -> None:
    remote = connect(own, asked)
    for _ in range(3):
        assert read(own, remote) == (PostingState.DONE, "")
    assert asked.numbers == [(1, MEET), (1, 1), (1, 2), (1, 3)]
    assert asked.asks[1].offsets.tolist() == SOME.src.tolist()
    assert asked.asks[1].nbytes.tolist() == SOME.nbytes.tolist()


def test_what_waits_is_asked_for_one_after_the_other(own: Own, asked: Asked) -> None:
    remote = connect(own, asked)
    wakes = [Wake() for _ in range(5)]
    postings = [remote.read(SOME, wake) for wake in wakes]
    assert [finish(own.path, *both) for both in zip(postings, wakes, strict=True)] == [PostingState.DONE] * 5
    assert asked.numbers == [(1, number) for number in range(6)]


def test_a_send_that_is_refused_takes_no_number_and_fails_nothing_else(own: Own, asked: Asked) -> None:
    remote = connect(own, asked)
    asked.changed = lambda ask: ((), "the access is closed", LEAD) if ask.sequence == 2 else None
    wakes = [Wake() for _ in range(2)]
    first, second = (remote.read(SOME, wake) for wake in wakes)
    assert finish(own.path, first, wakes[0]) is PostingState.DONE
    assert finish(own.path, second, wakes[1]) is PostingState.FAILED
    assert second.error == "the access is closed"
    asked.changed = lambda _: None
    assert read(own, remote) == (PostingState.DONE, "")
    assert asked.numbers == [(1, MEET), (1, 1), (1, 2), (1, 2)]


def test_an_answer_that_is_lost_ends_the_epoch_and_the_next_read_begins_another(own: Own, asked: Asked) -> None:
    remote = connect(own, asked)
    assert read(own, remote) == (PostingState.DONE, "")
    own.reset()

    def lost(ask: SendAsk) -> Said:
        asked.peer.send(asked.name, ask)  # the peer sends all the same
        return (), "no answer came", LOST

    asked.changed = lost
    assert read(own, remote) == (PostingState.FAILED, "no answer came")
    assert (own.bytes() == GUARD).all(), "nothing was received"
    asked.changed = lambda _: None
    assert read(own, remote) == (PostingState.DONE, "")
    assert asked.numbers == [(1, MEET), (1, 1), (1, 2), (2, MEET), (2, 1)]
    assert np.array_equal(own.bytes()[2_000:3_002_000], asked.peer.content[70_000:3_070_000])


def test_a_read_that_misses_its_group_at_the_source_has_another_one_made(own: Own, asked: Asked) -> None:
    """This happens after the source declared this engine dead and they met again."""
    remote = connect(own, asked)
    assert read(own, remote) == (PostingState.DONE, "")
    asked.changed = lambda ask: ((), "there is no process group of epoch 1", RANK) if ask.epoch == 1 else None
    assert read(own, remote) == (PostingState.DONE, "")
    assert asked.numbers == [(1, MEET), (1, 1), (1, 2), (2, MEET), (2, 1)]
    asked.changed = lambda ask: ((), "this rank cannot", RANK) if ask.sequence else None
    assert read(own, remote) == (PostingState.FAILED, "this rank cannot"), "once, and not for ever"
    assert asked.numbers[5:] == [(2, 2), (3, MEET), (3, 1)]


def test_a_peer_that_is_connected_again_has_a_higher_epoch(own: Own, asked: Asked) -> None:
    remote = connect(own, asked)
    assert read(own, remote) == (PostingState.DONE, "")
    remote.close()
    own.remotes.clear()
    assert isinstance(own.path, PumpedPath)
    assert [own.path.again(asked.name, asked) for _ in range(2)] == [2, 3]


def test_a_peer_that_was_taken_for_dead_and_comes_again_has_a_higher_epoch(own: Own, asked: Asked) -> None:
    connect(own, asked).close()
    own.remotes.clear()
    own.path.withdraw(asked.name)
    assert isinstance(own.path, PumpedPath)
    assert own.path.again(asked.name, asked) == 2


def test_a_group_that_cannot_be_made_is_a_reason(own: Own, asked: Asked) -> None:
    asked.changed = lambda _: ((), "this rank has no data path by which it sends", RANK)
    with pytest.raises(DataPathFailed, match=r"rank 0 of the peer says: .* by which it sends"):
        connect(own, asked)


def test_a_peer_of_another_library_is_no_peer(own: Own) -> None:
    assert isinstance(own.path, PumpedPath)
    with pytest.raises(DataPathUnavailable, match="a process group of nccl, this rank's memory takes one of gloo"):
        own.path.connect(RankEndpoint(0, collective=CollectiveEndpoint("nccl", SIZE, FRAMING)), None)


def test_a_peer_that_cuts_sends_otherwise_is_reached_another_way(own: Own) -> None:
    assert isinstance(own.path, PumpedPath)
    with pytest.raises(DataPathUnavailable, match="framing 7"):
        own.path.connect(RankEndpoint(0, collective=CollectiveEndpoint("gloo", SIZE, 7)), None)


def test_a_peer_that_is_reached_anew_ends_what_was_under_way(own: Own, asked: Asked) -> None:
    """One read waits for its answer, which comes too late, and another one for its turn."""
    remote = connect(own, asked)
    assert isinstance(own.path, PumpedPath)
    wakes = [Wake() for _ in range(2)]
    asked.changed = lambda ask: ((), "", LEAD) if ask.sequence else None  # answered, but not sent
    postings = [remote.read(SOME, wake) for wake in wakes]
    own.path.progress()
    asked.changed = lambda _: None
    own.path.again(asked.name, asked)
    assert [finish(own.path, *both) for both in zip(postings, wakes, strict=True)] == [PostingState.FAILED] * 2
    assert read(own, remote) == (PostingState.FAILED, "the peer's rank is reached anew")
    assert (own.bytes() == GUARD).all()


def test_a_source_that_stands_still_fails_what_waits_for_it(
    own: Own, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes, but the bytes do not: the connection is given up after the longest time for a message."""
    monkeypatch.setattr(group, "STALL_S", 0.2)
    remote = connect(own, asked)
    asked.changed = lambda ask: ((), "", LEAD) if ask.sequence else None  # answered, but not sent
    began = time.monotonic()
    state, error = read(own, remote)
    assert (state, "Timed out" in error) == (PostingState.FAILED, True), error
    assert time.monotonic() - began < DEADLINE_S
    asked.changed = lambda _: None
    assert read(own, remote) == (PostingState.DONE, "")
    assert asked.numbers[-2:] == [(2, MEET), (2, 1)]


def test_closing_under_a_read_ends_it_at_once_with_the_memory_at_rest(asked: Asked) -> None:
    with own_rank(CASE, (SIZE,)) as own:
        remote = connect(own, asked)
        asked.changed = lambda ask: ((), "", LEAD) if ask.sequence else None
        wake = Wake()
        posting = remote.read(SOME, wake)
        own.path.progress()
        began = time.monotonic()
        own.path.close()
        assert time.monotonic() - began < group.STALL_S / 2, "it waits for no message"
        assert posting.poll() is PostingState.FAILED
        assert posting.error == "the peer is disconnected"
        own.remotes.clear()


# ---- the source's side


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Iterator[CollectivePath]:
    from kvgrpc.datapath.collective import gloo

    monkeypatch.setattr(gloo, "CONNECT_S", AWAITED_S)
    memory = PrivateMemory.of(np.zeros(SIZE, dtype=np.uint8))
    path = CollectivePath(memory, HOST)
    path.bind(lambda act: act(), lambda *_: None)
    yield path
    path.close()


def sent(path: CollectivePath, epoch: int, sequence: int, offsets: Ids | None = None) -> str:
    """Asks a source to send, and returns why it does not."""
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    row = np.array([0], dtype=np.int64) if offsets is None else offsets
    values = () if sequence else NOBODY.values
    ask = SendAsk(0, 1, epoch, sequence, row, np.full(len(row), 8, dtype=np.int64), values)
    path.send("peer", ask, lambda _, error: said.put(error.message if error else ""))
    return said.get(timeout=DEADLINE_S)


def test_a_source_refuses_what_does_not_follow(source: CollectivePath) -> None:
    assert sent(source, 1, 1) == "there is no process group of epoch 1"
    assert sent(source, 1, MEET) == ""
    assert sent(source, 1, 2) == "send 2 does not follow send 0"
    assert sent(source, 2, 1) == "there is no process group of epoch 2"
    assert sent(source, 1, 1) == ""
    assert sent(source, 1, 1) == "send 1 does not follow send 1"
    assert sent(source, 1, MEET) == "epoch 1 is over: the process group is of epoch 1"
    assert sent(source, 3, MEET) == ""
    assert sent(source, 1, 2) == "there is no process group of epoch 1"
    assert sent(source, 2, MEET) == "epoch 2 is over: the process group is of epoch 3"
    assert "run 0 covers" in sent(source, 3, 1, np.array([SIZE], dtype=np.int64))
    assert sent(source, 3, 1) == "", "what is refused takes no number"


def test_a_source_that_hears_of_the_end_of_a_peer_forgets_its_groups(source: CollectivePath) -> None:
    assert sent(source, 7, MEET) == ""
    source.withdraw("another peer")
    assert sent(source, 7, 1) == ""
    source.withdraw("peer")
    assert sent(source, 7, 2) == "there is no process group of epoch 7"


def test_a_handshake_of_a_peer_begins_its_epochs_anew(source: CollectivePath) -> None:
    assert sent(source, 2**32 - 1, MEET) == ""
    source.offer(RankEndpoint(0), "another peer")
    assert "is over" in sent(source, 5, MEET)
    source.offer(RankEndpoint(0), "peer")
    assert sent(source, 5, MEET) == ""
    assert "is over" in sent(source, 5, MEET)


def test_only_so_many_sends_wait(source: CollectivePath) -> None:
    assert sent(source, 1, MEET) == ""
    for number in range(JOBS_MAX):
        assert sent(source, 1, number + 1) == ""
    assert sent(source, 1, JOBS_MAX + 1) == f"{JOBS_MAX} sends wait for those before them"


def test_only_so_many_runs_wait(source: CollectivePath) -> None:
    assert sent(source, 1, MEET) == ""
    half = np.zeros(WAITING_RUNS_MAX // 2, dtype=np.int64)
    for number in (1, 2):
        assert sent(source, 1, number, half) == ""
    assert sent(source, 1, 3) == f"more than {WAITING_RUNS_MAX} runs wait for the sends before them"


def test_the_address_that_peers_reach_is_that_of_the_way_to_them() -> None:
    assert own_host("127.0.0.1:5000") == "127.0.0.1"
    assert own_host("no such host:5000") == "127.0.0.1"
    assert own_host("") == "127.0.0.1"
