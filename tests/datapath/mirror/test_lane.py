"""A lane goes on, whatever one of its jobs does."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvgrpc.datapath.base import PostingState
from kvgrpc.datapath.mirror.lane import CopyJob, CopyLane, Start
from tests.datapath.mirror.devices import WAIT_S, Call


@pytest.fixture
def lane() -> Iterator[CopyLane]:
    made = CopyLane("lane")
    yield made
    made.stop()
    assert made.at_rest(WAIT_S)


def call() -> Call:
    nothing = np.empty(0, dtype=np.int64)
    return Call("out", nothing, nothing)


def test_a_job_whose_pieces_cannot_be_made_fails_alone_once_those_that_were_begun_are_over(lane: CopyLane) -> None:
    begun, started, ends = call(), threading.Event(), (threading.Event(), threading.Event())

    def start() -> Call:
        started.set()
        return begun

    def pieces() -> Iterator[Start]:
        yield start
        raise ValueError("runs beyond the memory")

    bad, good = CopyJob(pieces(), ends[0].set), CopyJob(iter(()), ends[1].set)
    for job in (bad, good):
        lane.copy(job)
    assert started.wait(WAIT_S)
    assert bad.poll() is PostingState.PENDING
    begun.end()
    assert ends[0].wait(WAIT_S)
    assert (bad.poll(), bad.error) == (PostingState.FAILED, "runs beyond the memory")
    assert ends[1].wait(WAIT_S)
    assert good.poll() is PostingState.DONE
