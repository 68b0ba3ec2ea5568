"""Limits on the process groups that a rank begins with peers that do not come."""

import queue
import resource
import secrets
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvgrpc.core.values.endpoints import CollectiveEndpoint, RankEndpoint
from kvgrpc.core.values.sends import MEET, SendAsk, Values
from kvgrpc.datapath.base import DataPathFailed
from kvgrpc.datapath.collective.group import GroupLibrary, ProcessGroup
from kvgrpc.datapath.collective.half import CONNECTIONS, TOKEN_BYTES, Half
from kvgrpc.datapath.collective.messages import FRAMING, Message
from kvgrpc.datapath.collective.path import CollectivePath
from kvgrpc.datapath.collective.rendezvous import Rendezvous
from kvgrpc.datapath.collective.unmade_groups import LATELY_S, OF_NEW_PEERS_MAX, OF_PAIR_MAX, OF_PEER_MAX, UnmadeGroups
from kvgrpc.datapath.host.memory import PrivateMemory
from tests.datapath.movers import until
from tests.datapath.peers import DEADLINE_S, open_descriptors
from tests.datapath.pumped import HOST, LONG_S

NBYTES = 1 << 20
SOMEBODY = Half(secrets.token_bytes(TOKEN_BYTES), ((socket.inet_aton(HOST), 65_535),) * CONNECTIONS)


class Source:
    """A rank whose library is not loaded until a test says so."""

    def __init__(self) -> None:
        self.loaded = threading.Event()
        self.path = CollectivePath(PrivateMemory.of(np.zeros(NBYTES, dtype=np.uint8)), HOST, self._load)
        self.time_s = 0.0
        self.path._unmade = UnmadeGroups(lambda: self.time_s)

    def _load(self) -> None:
        assert self.loaded.wait(LONG_S)
        raise RuntimeError("it cannot be loaded")

    def meet(self, epoch: int, peer: str = "peer", rank: int = 0, values: Values = SOMEBODY.values) -> str:
        """Returns why no group is begun; empty if one is."""
        refused: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.path.send(
            peer, SendAsk(0, rank, epoch, MEET, values=values), lambda _, why: refused.put(why.message if why else "")
        )
        return "" if refused.empty() else refused.get()

    @property
    def threads(self) -> int:
        return sum(thread.name == "kvgrpc-collective" for thread in threading.enumerate())

    def fail_all(self) -> None:
        """Lets all groups that are being made fail."""
        self.loaded.set()
        until(lambda: not self.threads)
        self.loaded.clear()


@pytest.fixture
def source() -> Iterator[Source]:
    made = Source()
    yield made
    made.loaded.set()
    made.path.close()


def test_a_half_that_is_none_begins_nothing_and_leaves_the_group_before_alone(source: Source) -> None:
    assert source.meet(1) == ""
    assert "a half of a process group tells" in source.meet(2, values=())
    assert source.threads == 1
    assert source.path._senders["peer", 0].epoch == 1
    assert not source.path._senders["peer", 0].group.broken


def test_a_peer_that_meets_again_and_again_has_few_groups_until_some_time_after_they_ended(source: Source) -> None:
    assert [source.meet(epoch) for epoch in range(1, OF_PAIR_MAX + 1)] == [""] * OF_PAIR_MAX
    assert "are being made or came to nothing" in source.meet(100)
    assert source.threads == OF_PAIR_MAX
    source.fail_all()
    assert "are being made or came to nothing" in source.meet(101)
    assert source.threads == 0
    source.time_s = LATELY_S + 1.0
    assert source.meet(102) == ""


def test_a_peer_that_is_gone_and_comes_again_has_no_more_of_them(source: Source) -> None:
    for epoch in range(1, OF_PAIR_MAX + 1):
        assert source.meet(epoch) == ""
        source.path.withdraw("peer")
    assert "are being made or came to nothing" in source.meet(100)


def test_a_peer_of_many_ranks_has_only_so_many_and_all_new_peers_together_have(source: Source) -> None:
    assert [source.meet(1, rank=rank) for rank in range(OF_PEER_MAX)] == [""] * OF_PEER_MAX
    assert "with this peer are being made" in source.meet(1, rank=OF_PEER_MAX)
    for peer in range(OF_NEW_PEERS_MAX - OF_PEER_MAX):
        assert source.meet(1, f"peer {peer}") == ""
    assert "of this rank are being made" in source.meet(1, "another one")
    assert source.threads == OF_NEW_PEERS_MAX


class Idle:
    """A library that has connected and does nothing."""

    def launch(self, message: Message, number: int) -> None:
        raise AssertionError

    def land(self, flying: Any, stall_s: float) -> None:
        raise AssertionError

    def shut_down(self) -> None:
        """Has nothing to end."""

    def close(self) -> None:
        """Has nothing to close."""


class Begun:
    """Groups begun with one rank of each peer; a group whose peer answered is connecting, and cannot be ended."""

    def __init__(self) -> None:
        self.making = UnmadeGroups()
        self.connected = threading.Event()
        self.groups: list[ProcessGroup] = []

    def begin(self, peer: str, *, answers: bool) -> None:
        pair = (peer, 0, False)
        self.making.check(pair)
        group = ProcessGroup(self._make, told=lambda _: None, ready=lambda: None)
        self.groups.append(group)
        self.making.add(pair, group)
        until(lambda: group.awaits_half)
        if answers:
            group.learn(())

    def close(self) -> None:
        self.connected.set()
        for group in self.groups:
            group.abort("the test is over")
            assert group.join(DEADLINE_S)

    def _make(self, rendezvous: Rendezvous) -> GroupLibrary:
        rendezvous.exchange(())
        assert self.connected.wait(LONG_S)
        return Idle()


@pytest.fixture
def begun() -> Iterator[Begun]:
    made = Begun()
    yield made
    made.close()


def test_where_there_are_too_many_the_first_goes_whose_peer_did_not_answer(begun: Begun) -> None:
    begun.begin("a peer that answers", answers=True)
    for number in range(OF_NEW_PEERS_MAX - 1):
        begun.begin(f"peer {number}", answers=False)
    begun.begin("one more", answers=False)
    first, second, *others = begun.groups
    assert second.join(DEADLINE_S)
    assert second.broken == "the peer did not answer while others came"
    assert not any(group.broken for group in (first, *others))


def test_peers_of_which_a_rank_has_come_have_places_that_new_ones_do_not_take(begun: Begun) -> None:
    begun.begin("an old peer", answers=True)
    begun.connected.set()
    until(lambda: begun.groups[0].made)
    begun.connected.clear()
    for number in range(OF_NEW_PEERS_MAX):
        begun.begin(f"peer {number}", answers=True)
    with pytest.raises(DataPathFailed, match=f"{OF_NEW_PEERS_MAX} process groups of this rank are being made"):
        begun.begin("one more", answers=True)
    begun.begin("an old peer", answers=True)
    begun.making.forget("an old peer")
    with pytest.raises(DataPathFailed, match=f"{OF_NEW_PEERS_MAX} process groups of this rank are being made"):
        begun.begin("an old peer", answers=True)


def test_ranks_that_are_reached_count_among_them_and_a_refusal_is_a_reason(source: Source) -> None:
    endpoint = RankEndpoint(0, collective=CollectiveEndpoint("gloo", NBYTES, FRAMING))
    for _ in range(OF_PAIR_MAX):
        source.path.reach(0, "peer", endpoint, lambda _: None)
    with pytest.raises(DataPathFailed, match="are being made or came to nothing"):
        source.path.reach(0, "peer", endpoint, lambda _: None)
    assert source.meet(1) == "", "the other direction is another group"


@pytest.fixture
def few_files() -> Iterator[None]:
    """Lowers the limit of open descriptors until only the reserve is left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_descriptors() * 4 // 3, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_files")
def test_no_group_is_begun_that_takes_descriptors_of_the_reserve(source: Source) -> None:
    assert "more open files than this process has to spare" in source.meet(1)
    assert source.threads == 0
