"""A posting into a mirror ends when the device has its bytes, or when the device fails."""

import logging
import queue
from collections.abc import Iterator

import numpy as np
import pytest

from kvgrpc.core.events import PeerMapped, PostingEnded
from kvgrpc.core.values.endpoints import LoopbackEndpoint, RankEndpoint
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.mirror.device import CopyFailed
from kvgrpc.datapath.mirror.mirror import Mirror, make_memory
from kvgrpc.datapath.mover import Mover
from kvgrpc.datapath.reports import Disconnected, Report
from tests.datapath.loopback import LoopbackPath
from tests.datapath.mirror.devices import NBYTES, WAIT_S, Device
from tests.datapath.movers import post_of
from tests.datapath.peers import content, runs_of


class Mirrored:
    """A mover whose memory is the mirror of a device, and a peer that it reads."""

    def __init__(self) -> None:
        self.device = Device()
        self.memory = make_memory(self.device)
        self.theirs = content(1, NBYTES)
        self.peer = LoopbackPath(PrivateMemory.of(self.theirs), "source")
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        mirror = Mirror(1, self.memory, self.device, lambda _: None)
        self.mover = Mover(1, self.memory, [LoopbackPath(self.memory, "own")], self.reports.put, mirror=mirror)
        self.mover.start()
        self.mover.connect("p", RankEndpoint(0, loopback=LoopbackEndpoint("source", NBYTES)), ["loopback"])
        assert isinstance(self.report(), PeerMapped)

    def report(self) -> Report:
        return self.reports.get(timeout=WAIT_S)

    def read(self, name: str) -> None:
        self.mover.post(post_of(name, "p", runs_of((64, 64, 128))))

    def ended(self) -> PostingEnded:
        report = self.report()
        assert isinstance(report, PostingEnded)
        return report

    def disconnected(self) -> str:
        """Disconnects the peer, and returns why its link is not proved closed."""
        self.mover.disconnect("p")
        report = self.report()
        assert isinstance(report, Disconnected)
        return report.error


@pytest.fixture
def rank() -> Iterator[Mirrored]:
    made = Mirrored()
    yield made
    made.mover.close(0.0)
    made.peer.close()


def test_a_posting_ends_when_the_device_has_its_bytes(rank: Mirrored) -> None:
    rank.read("a")
    copy = rank.device.next()
    assert (copy.way, copy.offsets, copy.nbytes) == ("in", [64], [128])
    assert np.array_equal(rank.memory.as_numpy()[64:192], rank.theirs[64:192])
    assert rank.reports.empty()
    copy.end()
    assert rank.ended().done
    assert rank.mover.close(WAIT_S)


def test_a_copy_into_the_device_that_failed_has_ended(rank: Mirrored) -> None:
    rank.read("a")
    rank.device.next().end(CopyFailed("broken"))
    ended = rank.ended()
    assert (ended.done, ended.message, ended.quiesced, ended.own_at_rest) == (False, "broken", True, True)
    assert not rank.disconnected()


def test_a_copy_that_the_device_lost_is_no_fault_of_the_data_path(
    rank: Mirrored, caplog: pytest.LogCaptureFixture
) -> None:
    rank.read("a")
    with caplog.at_level(logging.ERROR):
        rank.device.next().end(RuntimeError("who knows"))
        ended = rank.ended()
    assert (ended.done, ended.quiesced, ended.own_at_rest) == (False, False, False)
    assert "the device lost posting a" in caplog.text
    assert not rank.disconnected()
    assert not rank.mover.close(WAIT_S)
