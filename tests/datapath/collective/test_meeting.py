"""Two ranks that reach for each other during a handshake of their leads; each has a library to load."""

import errno
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest

from kvgrpc.core.events import EndpointOffered, MeetingBegan, PeerMapped, SendPosted, SendWanted
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.datapath.base import DataPath
from kvgrpc.datapath.collective import group, unmade_groups
from kvgrpc.datapath.collective.path import CollectivePath, _load_torch
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.mover import Mover
from kvgrpc.datapath.reports import Report
from tests.datapath.leads import Leads
from tests.datapath.loopback import LoopbackPath
from tests.datapath.movers import until
from tests.datapath.peers import DEADLINE_S
from tests.datapath.pumped import HOST, LONG_S

NBYTES = 1 << 20
PEER = "the other one"
ORDER = ("loopback", "collective")
NO_HOST_OF_OURS = "203.0.113.9"
"""Address for documentation, which no host has."""
Pair = tuple["SlowRank", "SlowRank"]


class SlowRank:
    """A rank whose library is loaded when a test says so."""

    def __init__(self, leads: Leads, engine: str, host: str = HOST, load: Callable[[], None] | None = None) -> None:
        self.name = engine, 0
        self.begun, self.loaded = threading.Event(), threading.Event()
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        memory = PrivateMemory.of(np.zeros(NBYTES, dtype=np.uint8))
        paths: list[DataPath] = [LoopbackPath(memory, engine), CollectivePath(memory, host, load or self._load)]
        self.mover = Mover(0, memory, paths, leads.reports_of(self.name, self.reports))
        leads.add(self.name, self.mover)
        self.mover.start()
        self.mover.offer("a handshake", PEER)
        offered = self.reports.get(timeout=DEADLINE_S)
        assert isinstance(offered, EndpointOffered)
        self.endpoint = offered.endpoint

    def _load(self) -> None:
        self.begun.set()
        assert self.loaded.wait(LONG_S)

    def reach(self, endpoint: RankEndpoint) -> None:
        self.mover.connect(PEER, endpoint, ORDER)

    def report(self) -> PeerMapped:
        mapped = self.reports.get(timeout=LONG_S)
        assert isinstance(mapped, PeerMapped)
        return mapped

    def mapped(self) -> str:
        """Returns the data path by which the other rank was reached."""
        return self.report().data_path


@pytest.fixture
def leads() -> Leads:
    return Leads(PEER)


@pytest.fixture
def both(leads: Leads) -> Iterator[Pair]:
    with ExitStack() as stack:
        ranks = []
        for engine in ("P", "D"):
            ranks.append(SlowRank(leads, engine))
            stack.callback(ranks[-1].mover.close, DEADLINE_S)
            stack.callback(ranks[-1].loaded.set)
        yield ranks[0], ranks[1]


@pytest.fixture
def make(leads: Leads) -> Iterator[Callable[..., SlowRank]]:
    """Makes ranks, and closes them at the end of the test."""
    with ExitStack() as stack:

        def begin(engine: str, host: str = HOST, load: Callable[[], None] | None = _load_torch) -> SlowRank:
            rank = SlowRank(leads, engine, host, load)
            stack.callback(rank.mover.close, DEADLINE_S)
            stack.callback(rank.loaded.set)
            return rank

        yield begin


def only_collective(rank: SlowRank) -> RankEndpoint:
    """Returns the rank's endpoint without its other paths, as if it were on another host."""
    return RankEndpoint(0, collective=rank.endpoint.collective)


@pytest.mark.parametrize("faster", [0, 1])
def test_both_load_at_once_and_neither_waits_for_the_other_to_begin(both: Pair, leads: Leads, faster: int) -> None:
    first, second = both[faster], both[1 - faster]
    first.reach(only_collective(second))
    second.reach(only_collective(first))
    for rank in both:
        assert rank.begun.wait(DEADLINE_S)
        until(partial(leads.heard_of, rank.name, MeetingBegan))
        assert leads.kinds(rank.name) == [MeetingBegan], "nobody was asked yet"
    first.loaded.set()
    until(partial(leads.heard_of, first.name, SendWanted))
    assert leads.kinds(second.name) == [MeetingBegan]
    second.loaded.set()
    assert [rank.mapped() for rank in both] == ["collective", "collective"]
    for rank in both:
        assert sorted(kind.__name__ for kind in leads.kinds(rank.name)) == ["MeetingBegan", "SendPosted", "SendWanted"]
        assert leads.kinds(rank.name)[0] is MeetingBegan
    assert SendPosted in leads.kinds(second.name)


def test_a_peer_that_a_better_path_reaches_has_nobody_load(both: Pair, leads: Leads) -> None:
    first, second = both
    first.reach(second.endpoint)
    assert first.mapped() == "loopback"
    assert not first.begun.is_set()
    assert leads.kinds(first.name) == []


def lacks_a_library() -> None:
    raise ImportError("libgloo.so: no such file")


@pytest.mark.parametrize(
    ("host", "load", "own", "told"),
    [
        (HOST, lacks_a_library, "this rank cannot make its half: libgloo.so: no such file", "libgloo.so"),
        (NO_HOST_OF_OURS, _load_torch, "this rank cannot make its half: ", "cannot make its half: "),
        ("::1", _load_torch, "IPv6", "IPv6"),
    ],
    ids=["a library is missing", "no interface has the address", "one side has IPv6 only"],
)
def test_a_meeting_that_no_other_try_brings_about_says_which_side_failed_and_why(
    make: Callable[..., SlowRank], host: str, load: Callable[[], None], own: str, told: str
) -> None:
    lacking, whole = make("P", host, load), make("D")
    for rank, other in ((lacking, whole), (whole, lacking)):
        rank.reach(only_collective(other))
    failed, heard = lacking.report(), whole.report()
    for report in (failed, heard):
        assert report.permanent, report
        assert not report.data_path
    assert own in dict(failed.rejected)["collective"]
    assert told in (why := dict(heard.rejected)["collective"])
    assert why.startswith("rank 0 of the peer says: ") or "IPv6" in why, "it blames nobody else"


def test_a_meeting_that_the_other_rank_misses_is_worth_another_try(
    make: Callable[..., SlowRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "BUILD_S", 0.1)
    waiting, loading = make("D"), make("P", load=None)
    waiting.reach(only_collective(loading))
    report = waiting.report()
    assert dict(report.rejected)["collective"] == "the other rank did not come"
    assert not report.permanent


def lacks_descriptors() -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_rank_that_lacks_something_for_a_while_is_worth_another_try(make: Callable[..., SlowRank]) -> None:
    lacking, whole = make("P", HOST, lacks_descriptors), make("D")
    for rank, other in ((lacking, whole), (whole, lacking)):
        rank.reach(only_collective(other))
    for report in (lacking.report(), whole.report()):
        assert "Too many open files" in dict(report.rejected)["collective"]
        assert not report.permanent


@pytest.mark.parametrize(
    ("name", "least", "why"), [("OF_PAIR_MAX", 0, "in the last 30 s"), ("spare", lambda _: False, "open files")]
)
def test_a_meeting_that_is_refused_for_a_while_is_worth_another_try(
    make: Callable[..., SlowRank], leads: Leads, monkeypatch: pytest.MonkeyPatch, name: str, least: object, why: str
) -> None:
    monkeypatch.setattr(unmade_groups, name, least)
    refusing, other = make("P"), make("D")
    refusing.reach(only_collective(other))
    report = refusing.report()
    assert leads.kinds(refusing.name) == [MeetingBegan]
    assert why in dict(report.rejected)["collective"]
    assert not report.permanent
    assert not report.data_path


def test_a_meeting_that_is_refused_leaves_the_next_data_path(
    make: Callable[..., SlowRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unmade_groups, "OF_PAIR_MAX", 0)
    refusing, other = make("P"), make("D")
    refusing.mover.connect(PEER, other.endpoint, ORDER[::-1])
    assert refusing.mapped() == "loopback"
